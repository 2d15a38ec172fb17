//! Names of VMs: which can be used, and the one that an image gives. Pure.

use anyhow::bail;

/// `[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}`.
pub(super) fn check_name(name: &str) -> anyhow::Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) || !name.chars().all(plain) || name.len() > 63 {
        bail!(
            "VM name {name:?} cannot be used; a name has up to 63 letters, digits, `.`, `_`, `-`, and begins with a letter or digit"
        );
    }
    Ok(())
}

/// `cocoon-`, the repository's path without the registry, the tag unless it is `latest`.
pub(super) fn default_name(image: &str) -> String {
    let image = image.split_once('@').map_or(image, |(name, _)| name);
    let (path, tag) = match image.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, tag),
        _ => (image, "latest"),
    };
    let path = match path.split_once('/') {
        Some((host, rest)) if host.contains(['.', ':']) || host == "localhost" => rest,
        _ => path,
    };
    let tail = if tag == "latest" { String::new() } else { format!("-{tag}") };
    let name = format!("cocoon-{path}{tail}")
        .replace(|c: char| !c.is_ascii_alphanumeric() && !"._-".contains(c), "-");
    name.chars().take(63).collect()
}
