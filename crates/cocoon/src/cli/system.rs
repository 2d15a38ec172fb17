//! `cocoon gc` and `cocoon version`.

use cocoon_engine::engine::MemoryRecipe;

use super::{
    Build, Exit,
    output::{note, print},
    settings::Settings,
};

/// Removes what nothing needs. stdout stays empty; what went is said on stderr.
pub async fn gc(settings: &Settings) -> anyhow::Result<Exit> {
    let removed = match settings.existing(MemoryRecipe::Auto).await? {
        Some(engine) => engine.gc().await?,
        None => Vec::new(),
    };
    for what in &removed {
        note(format_args!("removed {what}"));
    }
    note(format_args!("gc: {} removed", removed.len()));
    Ok(Exit::SUCCESS)
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
    #[test]
    fn version_has_five_labelled_lines() {
        let text = super::version_text(super::Build { git: Some("abc-dirty"), built: None });
        assert!(text.contains("Git hash: abc-dirty\nBuilt: unknown\n"), "{text}");
        let labels: Vec<_> = text.lines().map(|line| line.split(": ").next().unwrap()).collect();
        assert_eq!(labels, ["Version", "Git hash", "Built", "Rust version", "OS/Arch"]);
    }
}
