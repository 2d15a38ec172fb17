//! `cocoon gc` and `cocoon version`.

use std::path::Path;

use anyhow::Context as _;
use cocoon_engine::engine::MemoryRecipe;
use cocoon_oci::layout::{self, OciLayout};

use crate::registry;

use super::{
    Build, Exit,
    output::{note, print},
    settings::Settings,
    size,
};

/// Removes what nothing needs. stdout stays empty; what went is said on stderr.
pub async fn gc(settings: &Settings) -> anyhow::Result<Exit> {
    let mut removed = match settings.existing(MemoryRecipe::Auto).await? {
        Some(engine) => engine.gc().await?,
        None => Vec::new(),
    };
    // A registry that is no folder collects its own garbage.
    let registry = match registry::folder(std::env::var_os(registry::VARIABLE), &settings.root_dir) {
        Ok(folder) => collect(&folder).await.map(|went| removed.extend(went)),
        Err(_) => Ok(()),
    };
    // What the engine removed is said even if the registry folder fails.
    for what in &removed {
        note(format_args!("removed {what}"));
    }
    note(format_args!("gc: {} removed", removed.len()));
    registry.map(|()| Exit::SUCCESS)
}

/// Removes blobs that no tag needs, as `cocoon up` does now and then. A folder that is no layout stays as it is.
async fn collect(folder: &Path) -> anyhow::Result<Option<String>> {
    if !folder.join("oci-layout").exists() {
        return Ok(None);
    }
    let layout = OciLayout::open(folder)
        .with_context(|| format!("opening the registry folder {}", folder.display()))?;
    let went = layout.collect(layout::GRACE).await?;
    let any = went.blobs > 0 || went.temporaries > 0;
    Ok(any.then(|| {
        let (blobs, bytes, left) = (went.blobs, size::show(went.bytes), went.temporaries);
        let folder = folder.display();
        format!(
            "from registry {folder}: {blobs} blobs that no tag needs ({bytes}), {left} left-overs of writers"
        )
    }))
}

/// Prints the five lines of the contract; the language is ours.
pub fn version(build: Build) -> anyhow::Result<Exit> {
    print(&version_text(build))?;
    Ok(Exit::SUCCESS)
}

fn version_text(build: Build) -> String {
    let (git, built) = (build.git.unwrap_or("unknown"), build.built.unwrap_or("unknown"));
    format!(
        "Version: {}\nGit hash: {git}\nBuilt: {built}\nRust version: {} or newer\nOS/Arch: {}/{}\n",
        env!("CARGO_PKG_VERSION"),
        env!("CARGO_PKG_RUST_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH,
    )
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        time::{Duration, SystemTime},
    };

    use cocoon_oci::{
        digest,
        layout::{GRACE, OciLayout},
        registry::Registry as _,
    };

    use super::collect;

    #[tokio::test]
    async fn gc_says_what_went_from_the_registry_and_makes_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("registry");
        assert_eq!(collect(&path).await.unwrap(), None);
        assert!(!path.exists());
        let layout = OciLayout::open(&path).unwrap();
        let digest = digest::of(b"stray");
        layout.put_bytes("vm", &digest, b"stray".as_slice().into()).await.unwrap();
        assert_eq!(collect(&path).await.unwrap(), None, "it may belong to a push");
        let blob = path.join("blobs/sha256").join(digest::hex_of(&digest).unwrap());
        let old = SystemTime::now() - GRACE - Duration::from_secs(1);
        File::options().write(true).open(&blob).unwrap().set_modified(old).unwrap();
        let said = collect(&path).await.unwrap().unwrap();
        assert!(said.contains("1 blobs") && said.contains("5B") && !blob.exists(), "{said}");
    }

    #[test]
    fn version_has_five_labelled_lines() {
        let text = super::version_text(super::Build { git: Some("abc-dirty"), built: None });
        assert!(text.contains("Git hash: abc-dirty\nBuilt: unknown\n"), "{text}");
        let labels: Vec<_> = text.lines().map(|line| line.split(": ").next().unwrap()).collect();
        assert_eq!(labels, ["Version", "Git hash", "Built", "Rust version", "OS/Arch"]);
    }
}
