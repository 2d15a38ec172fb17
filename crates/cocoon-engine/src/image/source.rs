//! Where layers come from: tar files, an OCI or docker archive, a registry.
//!
//! Entry point: [`open`]. The first file decides (`engine-cli` §5, "Import detection"): gzip is exactly
//! one stream, qcow2 is refused, a tar that holds an image is that image, any other tar is a layer.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Read},
    path::{Path, PathBuf},
};

use cocoon_oci::image::{ImageError, ImageSource, open_archive};
use sha2::{Digest as _, Sha256};

use super::{bare, files::hash, tarball};
use crate::error::{Fault, ImportError};

/// The layers of one image, lowest first. Digests are hex.
pub(super) trait Source: Send + Sync {
    /// Hex digest of the image.
    fn image(&self) -> &str;
    /// Hex digests of the layers.
    fn layers(&self) -> &[String];
    /// The uncompressed tar of a layer; a wrong digest surfaces as an error at its end.
    fn open(&self, layer: usize) -> io::Result<Box<dyn Read + Send + '_>>;
}

/// Decides what the files are, by their content.
pub(super) fn open(image: &str, paths: Vec<PathBuf>, max_bytes: u64) -> Result<Box<dyn Source>, ImportError> {
    let unusable =
        |reason: &str| ImportError::Unusable { image: image.to_owned(), reason: reason.to_owned() };
    let fault = |error: io::Error| match error.kind() {
        io::ErrorKind::FileTooLarge => ImportError::Hostile {
            image: image.to_owned(),
            entry: "(the whole archive)".to_owned(),
            reason: tarball::TOO_LONG.to_owned(),
        },
        _ => Fault::new(format!("image {image}: {}", shown(&paths)), error).into(),
    };
    let first = paths
        .first()
        .ok_or_else(|| unusable("no archive was given; name a tar file, or write one to standard input"))?;
    if let Some(wrong) = paths.iter().find_map(|path| not_a_file(path)) {
        return Err(unusable(&wrong));
    }
    let kinds =
        paths.iter().map(|path| kind_of(path, max_bytes)).collect::<io::Result<Vec<_>>>().map_err(fault)?;
    match kinds[0] {
        Kind::Qcow2 { hostile: true } => Err(ImportError::Hostile {
            image: image.to_owned(),
            entry: shown(&paths),
            reason: "a qcow2 file that names a backing or data file would read files of this host".to_owned(),
        }),
        Kind::Qcow2 { hostile: false } => Err(unusable(
            "qcow2 cloud images are not taken in this release; import a container image (a tar)",
        )),
        Kind::Other => Err(unusable(
            "neither a tar nor one that gzip or zstd compressed, which are read (nor a qcow2, which is not taken \
                 yet); decompress others first, such as with `xz -d FILE` or `bzip2 -d FILE`",
        )),
        Kind::Compressed if paths.len() > 1 => {
            Err(unusable("a compressed archive must be the only file; unpack the layers first"))
        }
        Kind::Image => match open_archive(first) {
            Ok(archive) if paths.len() == 1 => Ok(Box::new(Archive::new(archive))),
            Ok(_) => Err(unusable("an image archive must be the only file")),
            Err(error) => Err(archive_error(image, error)),
        },
        Kind::Compressed => Ok(Box::new(Tars::new(paths.clone(), max_bytes).map_err(fault)?)),
        Kind::Tar if kinds.iter().all(|kind| matches!(kind, Kind::Tar)) => {
            Ok(Box::new(Tars::new(paths.clone(), max_bytes).map_err(fault)?))
        }
        Kind::Tar => Err(unusable("every file must be a plain tar, one a layer, the lowest first")),
    }
}

/// Why something that is there cannot be read as an archive, and what can. What is not there says so later.
fn not_a_file(path: &Path) -> Option<String> {
    let facts = std::fs::metadata(path).ok()?;
    let path = path.display();
    if facts.is_dir() {
        return Some(format!(
            "{path} is a folder; pack it, an OCI layout or a root file system alike: `tar -C {path} -cf - . | cocoon \
             image import NAME`"
        ));
    }
    (!facts.is_file()).then(|| {
        format!(
            "{path} must be a regular file, because it is read more than once; write it to a file first, or to \
             standard input (`... | cocoon image import NAME`)"
        )
    })
}

fn shown(paths: &[PathBuf]) -> String {
    match paths.first() {
        None => String::new(),
        // A caller's open file, such as kept standard input.
        Some(path) if path.starts_with("/proc/self/fd") => "standard input".to_owned(),
        Some(path) => path.display().to_string(),
    }
}

/// What an archive error means for an import.
pub(super) fn archive_error(image: &str, error: ImageError) -> ImportError {
    match error {
        ImageError::Invalid { message, .. } => {
            ImportError::Unusable { image: image.to_owned(), reason: message }
        }
        other => Fault::new(format!("image {image}"), other).into(),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A tar with an image inside, perhaps compressed.
    Image,
    /// One compressed tar that is a layer.
    Compressed,
    /// A plain tar that is a layer.
    Tar,
    Qcow2 {
        /// It names another file of the host.
        hostile: bool,
    },
    Other,
}

fn kind_of(path: &PathBuf, max_bytes: u64) -> io::Result<Kind> {
    let mut head = Vec::new();
    File::open(path)?.take(512).read_to_end(&mut head)?;
    if head.starts_with(b"QFI\xfb") {
        return Ok(Kind::Qcow2 { hostile: qcow2_names_a_file(&head) });
    }
    let compressed = head.starts_with(&[0x1f, 0x8b]) || head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
    let image = match holds_an_image(path, max_bytes) {
        Ok(image) => image,
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => return Err(error),
        Err(_) => return Ok(Kind::Other),
    };
    Ok(match (image, compressed) {
        (true, _) => Kind::Image,
        (false, true) => Kind::Compressed,
        (false, false) => Kind::Tar,
    })
}

/// Backing file offset (8..16) or, from version 3, the incompatible feature "external data file".
fn qcow2_names_a_file(head: &[u8]) -> bool {
    let field =
        |at: usize| head.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
    let version = head.get(4..8).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
    field(8) != Some(0) || (version >= Some(3) && field(72).is_none_or(|features| features & 0b100 != 0))
}

/// Whether one of the first members makes this an image archive; an error if it is no tar.
fn holds_an_image(path: &PathBuf, max_bytes: u64) -> io::Result<bool> {
    let mut archive = tar::Archive::new(plain(path, max_bytes)?);
    let mut any = false;
    // Writers put these among the blobs, and in any order: look at all names, never at contents.
    for entry in archive.entries()?.raw(true).take(MAX_LOOKED_AT) {
        let entry = entry?;
        any = true;
        let name = entry.path_bytes();
        let name = name.strip_prefix(b"./").unwrap_or(&name);
        if name == b"oci-layout" || name == b"manifest.json" {
            return Ok(true);
        }
    }
    if any { Ok(false) } else { empty_tar(path) }
}

/// A layer may be empty: at least one block of zeros.
fn empty_tar(path: &PathBuf) -> io::Result<bool> {
    let mut head = Vec::new();
    plain(path, u64::MAX)?.take(512).read_to_end(&mut head)?;
    if head.len() == 512 && head.iter().all(|byte| *byte == 0) {
        Ok(false)
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

/// Members of an image archive that are looked at before it is taken for a layer.
const MAX_LOOKED_AT: usize = 10_000;

/// An image archive or an image in a registry.
#[derive(Debug)]
pub(super) struct Archive {
    source: ImageSource,
    image: String,
    layers: Vec<String>,
}

impl Archive {
    /// Wraps what `cocoon-oci` opened.
    pub(super) fn new(source: ImageSource) -> Self {
        let layers = source.layers.iter().map(|layer| bare(&layer.digest).to_owned()).collect();
        Self { image: bare(&source.digest).to_owned(), layers, source }
    }
}

impl Source for Archive {
    fn image(&self) -> &str {
        &self.image
    }

    fn layers(&self) -> &[String] {
        &self.layers
    }

    fn open(&self, layer: usize) -> io::Result<Box<dyn Read + Send + '_>> {
        let reader = self.source.open_layer(layer).map_err(io::Error::other)?;
        Ok(Box::new(reader))
    }
}

/// Plain tar files as layers.
#[derive(Debug)]
pub(super) struct Tars {
    files: Vec<PathBuf>,
    max_bytes: u64,
    layers: Vec<String>,
    image: String,
}

impl Tars {
    /// Hashes the tars: a layer's digest is that of its tar, the image's that of the hex strings joined.
    pub(super) fn new(files: Vec<PathBuf>, max_bytes: u64) -> io::Result<Self> {
        let layers =
            files.iter().map(|path| hash(&mut plain(path, max_bytes)?)).collect::<io::Result<Vec<_>>>()?;
        let image = hex::encode(Sha256::digest(layers.concat()));
        Ok(Self { files, max_bytes, layers, image })
    }
}

/// The file's tar: unpacked on the way if it is compressed, but never to more than `max_bytes`.
fn plain(path: &PathBuf, max_bytes: u64) -> io::Result<Box<dyn Read + Send>> {
    let mut file = BufReader::new(File::open(path)?);
    Ok(match file.fill_buf()? {
        [0x1f, 0x8b, ..] => {
            Box::new(Limited { from: flate2::bufread::MultiGzDecoder::new(file), left: max_bytes })
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Box::new(Limited { from: zstd::Decoder::with_buffer(file)?, left: max_bytes })
        }
        _ => Box::new(file),
    })
}

/// What may unpack to far more than it is long.
struct Limited<R> {
    from: R,
    left: u64,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.left = self.left.checked_sub(read as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(read)
    }
}

impl Source for Tars {
    fn image(&self) -> &str {
        &self.image
    }

    fn layers(&self) -> &[String] {
        &self.layers
    }

    fn open(&self, layer: usize) -> io::Result<Box<dyn Read + Send + '_>> {
        let path = self.files.get(layer).ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(Checked {
            from: plain(path, self.max_bytes)?,
            sum: Sha256::new(),
            wanted: &self.layers[layer],
        }))
    }
}

/// The file was hashed before; it must not have changed since.
struct Checked<'a> {
    from: Box<dyn Read + Send>,
    sum: Sha256,
    wanted: &'a str,
}

impl Read for Checked<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.sum.update(&buffer[..read]);
        if read == 0 && !buffer.is_empty() && hex::encode(self.sum.clone().finalize()) != self.wanted {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file changed while it was imported"));
        }
        Ok(read)
    }
}
