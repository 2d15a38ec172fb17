//! Reading a folder of vector files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

/// What a file's vectors are worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// Our answers must be these.
    #[default]
    Contract,
    /// How the original behaves, weak points included.
    Informative,
}

/// One question and the original's answer.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Vector {
    pub(crate) id: String,
    #[serde(rename = "fn", default)]
    pub(crate) function: String,
    #[serde(rename = "in", default)]
    pub(crate) input: Value,
    #[serde(rename = "out", default)]
    pub(crate) output: Value,
    /// What stands beside question and answer.
    #[serde(flatten)]
    pub(crate) extra: serde_json::Map<String, Value>,
}

/// One file of vectors.
#[derive(Debug)]
pub(crate) struct VectorFile {
    /// File name without ending; the folder's name for `snapshot_artifacts/index.json`.
    pub(crate) name: String,
    pub(crate) level: Level,
    pub(crate) vectors: Vec<Vector>,
    /// Where the data that its vectors name lies.
    pub(crate) folder: PathBuf,
}

#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    level: Level,
    vectors: Option<Vec<Vector>>,
}

/// Files that hold data for other files' vectors.
const DATA_ONLY: [&str; 1] = ["engine_seed"];

/// Every vector file of a folder, by name.
pub(crate) fn read(dir: &Path) -> Result<Vec<VectorFile>> {
    let mut paths: Vec<PathBuf> = Vec::new();
    let entries = std::fs::read_dir(dir).with_context(|| {
        format!("cannot read the vector folder {}: name one that holds *.json files", dir.display())
    })?;
    for entry in entries {
        let path = entry?.path();
        let index = path.join("index.json");
        if path.extension().is_some_and(|ending| ending == "json") {
            paths.push(path);
        } else if index.is_file() {
            paths.push(index);
        }
    }
    paths.sort();
    ensure!(!paths.is_empty(), "the folder {} holds no vector files (*.json)", dir.display());
    let mut files = Vec::new();
    for path in paths {
        files.extend(read_file(&path)?);
    }
    Ok(files)
}

fn read_file(path: &Path) -> Result<Option<VectorFile>> {
    let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
    let named = if path.ends_with("index.json") { folder.as_path() } else { path };
    let name = named.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    if DATA_ONLY.contains(&name.as_str()) {
        return Ok(None);
    }
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let document: Document =
        serde_json::from_slice(&bytes).with_context(|| format!("{} is no vector file", path.display()))?;
    Ok(document.vectors.map(|vectors| VectorFile { name, level: document.level, vectors, folder }))
}
