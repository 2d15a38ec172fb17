//! Where saved VMs are kept.
//!
//! Entry point: [`folder`]. All commands read [`VARIABLE`] here, so it means the same to each.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use cocoon_oci::layout;
use thiserror::Error;

/// The variable that names the registry.
pub const VARIABLE: &str = "OCI_REGISTRY";

/// The variable names no registry folder.
#[derive(Debug, Error)]
#[error(
    "{VARIABLE}={0}: this release knows oci-layout:PATH only; unset it to keep saved VMs in the data folder"
)]
pub struct NoFolder(String);

/// The registry folder: `oci-layout:PATH` of the variable's value `named`, or the folder `registry` of the data
/// folder. An empty value is none, as for a shell that cannot unset.
pub fn folder(named: Option<OsString>, data: &Path) -> Result<PathBuf, NoFolder> {
    let Some(named) = named.filter(|named| !named.is_empty()) else { return Ok(data.join("registry")) };
    // A value that is no text names something that we cannot tell; it is never taken for none.
    let path = named.to_str().and_then(layout::path_of);
    path.ok_or_else(|| NoFolder(named.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    #[test]
    fn the_registry_folder_is_the_one_that_is_named_or_that_of_the_data_folder() {
        let folder = |named: Option<&str>| folder(named.map(Into::into), Path::new("/data")).ok();
        for (named, expected) in [
            (None, Some("/data/registry")),
            (Some(""), Some("/data/registry")),
            (Some("oci-layout:/saved"), Some("/saved")),
            (Some("oci-layout:saved"), Some("saved")),
            (Some("oci-layout:"), None),
            (Some(" "), None),
            (Some("registry.example/vms"), None),
        ] {
            assert_eq!(folder(named).as_deref(), expected.map(Path::new), "{named:?}");
        }
    }

    #[test]
    fn a_value_that_is_no_text_is_refused_and_shown() {
        let named = OsString::from_vec(b"oci-layout:/\xff".to_vec());
        let why = folder(Some(named), Path::new("/data")).unwrap_err().to_string();
        assert!(why.contains("OCI_REGISTRY=oci-layout:/") && why.contains("oci-layout:PATH only"), "{why}");
    }
}
