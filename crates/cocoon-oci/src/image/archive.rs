//! Image archives: an OCI layout in a tar (`oci-archive`) or what `docker save` writes.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
    path::Path,
    sync::Arc,
};

use bytes::Bytes;

use super::{
    ImageError, ImageSource, LayerRef, MAX_CONFIG, MAX_LAYER, Origin, check_config, check_kind, config_size,
    diff_ids, invalid, layers_of, parse_manifest, platform_entry,
};
use crate::{
    digest,
    json::{Node, parse},
    manifest::{Descriptor, Document, MAX_MANIFEST},
    tarfmt::{Assembler, BLOCK, Fed, padding},
};

/// Members of an archive that are looked at, at most.
const MAX_MEMBERS: usize = 100_000;
/// Most bytes of a compressed archive once unpacked.
const MAX_UNPACKED: u64 = 64 << 30;
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Opens an archive that holds one image.
pub fn open_archive(path: &Path) -> Result<ImageSource, ImageError> {
    open_archive_named(path, None)
}

/// Opens an archive; `name` picks the image (its tag or reference name) when there are several.
pub fn open_archive_named(path: &Path, name: Option<&str>) -> Result<ImageSource, ImageError> {
    let failed = |source| ImageError::Archive { path: path.display().to_string(), source };
    let file = File::open(path).and_then(unpacked).map_err(failed)?;
    let members = Members::read(file).map_err(failed)?;
    let archive = Archive { name: path.display().to_string(), members };
    let oci = archive.members.find("oci-layout").is_some() && archive.members.find("index.json").is_some();
    if oci {
        archive.oci(name)
    } else if archive.members.find("manifest.json").is_some() {
        archive.docker(name)
    } else {
        Err(invalid(&archive.name, "it holds neither oci-layout with index.json nor manifest.json"))
    }
}

/// A compressed archive is unpacked into an unnamed temporary file: members are read at random.
fn unpacked(mut file: File) -> io::Result<File> {
    let mut magic = [0_u8; 4];
    let read = file.read_at(&mut magic, 0)?;
    let mut decoder: Box<dyn Read> = match &magic[..read] {
        [0x1f, 0x8b, ..] => Box::new(flate2::read::MultiGzDecoder::new(file)),
        [0x28, 0xb5, 0x2f, 0xfd] => Box::new(zstd::Decoder::new(file)?),
        _ => {
            file.seek(SeekFrom::Start(0))?;
            return Ok(file);
        }
    };
    let mut plain = tempfile::tempfile()?;
    let copied = io::copy(&mut (&mut decoder).take(MAX_UNPACKED + 1), &mut plain)?;
    if copied > MAX_UNPACKED {
        return Err(bad(format!("it unpacks to more than {MAX_UNPACKED} bytes")));
    }
    Ok(plain)
}

fn bad(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// Where each file of the archive lies.
#[derive(Debug)]
struct Members {
    file: Arc<File>,
    files: BTreeMap<String, (u64, u64)>,
    links: BTreeMap<String, String>,
}

impl Members {
    fn read(file: File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let mut members = Self { file: Arc::new(file), files: BTreeMap::new(), links: BTreeMap::new() };
        let mut assembler = Assembler::default();
        let mut at = 0;
        for _ in 0..MAX_MEMBERS {
            let mut block = [0_u8; BLOCK];
            if at >= length {
                return Ok(members); // some writers leave the end marker out
            }
            members.file.read_exact_at(&mut block, at)?;
            at += BLOCK as u64;
            match assembler.feed(&block).map_err(bad)? {
                Fed::Zero => return Ok(members),
                Fed::Extension(size) => {
                    // The assembler has capped the size.
                    let mut body = vec![0_u8; usize::try_from(size).unwrap_or_default()];
                    members.file.read_exact_at(&mut body, at)?;
                    assembler.extension(&body).map_err(bad)?;
                    at += size + padding(size);
                }
                Fed::Member(member) => {
                    let end = at.checked_add(member.size).filter(|end| *end <= length);
                    let end = end.ok_or_else(|| bad(format!("member {:?} is cut short", member.name)))?;
                    members.note(&member, at);
                    at = end + padding(member.size);
                }
            }
        }
        Err(bad(format!("more than {MAX_MEMBERS} members")))
    }

    fn note(&mut self, member: &crate::tarfmt::Member, at: u64) {
        let Some(name) = normal("", &member.name) else { return };
        match member.kind {
            _ if member.is_file() => drop(self.files.insert(name, (at, member.size))),
            b'1' => drop(normal("", &member.link).map(|target| self.links.insert(name, target))),
            b'2' => {
                let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
                drop(normal(&folder, &member.link).map(|target| self.links.insert(name, target)));
            }
            _ => {}
        }
    }

    /// A file, also through links inside the archive.
    fn find(&self, name: &str) -> Option<(u64, u64)> {
        let mut name = normal("", name)?;
        for _ in 0..8 {
            if let Some(place) = self.files.get(&name) {
                return Some(*place);
            }
            name.clone_from(self.links.get(&name)?);
        }
        None
    }
}

/// `folder/name` without `.`, `..` and empty parts; `None` when it leaves the archive.
fn normal(folder: &str, name: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(name.split('/')) {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Layers as byte ranges of the archive.
#[derive(Debug)]
pub(super) struct Slices {
    file: Arc<File>,
    places: Vec<(u64, u64)>,
}

impl Slices {
    pub(super) fn open(&self, index: usize) -> Slice {
        let (at, left) = self.places[index];
        Slice { file: Arc::clone(&self.file), at, left }
    }
}

/// One layer's stored bytes.
#[derive(Debug)]
pub(super) struct Slice {
    file: Arc<File>,
    at: u64,
    left: u64,
}

impl Read for Slice {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.file.read_at(&mut buffer[..wanted], self.at)?;
        self.at += read as u64;
        self.left -= read as u64;
        Ok(read)
    }
}

struct Archive {
    name: String,
    members: Members,
}

impl Archive {
    fn bytes(&self, name: &str, cap: u64) -> Result<Bytes, ImageError> {
        let (at, size) = self
            .members
            .find(name)
            .ok_or_else(|| invalid(&self.name, format!("{name} is missing in the archive")))?;
        if size > cap {
            return Err(invalid(&self.name, format!("{name} has {size} bytes (at most {cap})")));
        }
        let mut bytes = vec![0_u8; usize::try_from(size).unwrap_or_default()];
        let read = self.members.file.read_exact_at(&mut bytes, at);
        read.map_err(|source| ImageError::Archive { path: self.name.clone(), source })?;
        Ok(bytes.into())
    }

    fn blob_name(&self, digest: &str) -> Result<String, ImageError> {
        let hex = digest::hex_of(digest);
        let hex = hex.ok_or_else(|| invalid(&self.name, format!("malformed digest {digest:?}")))?;
        Ok(format!("blobs/sha256/{hex}"))
    }

    fn manifest(&self, digest: &str) -> Result<Document, ImageError> {
        let bytes = self.bytes(&self.blob_name(digest)?, MAX_MANIFEST)?;
        if digest::of(&bytes) != digest {
            return Err(invalid(&self.name, format!("the manifest {digest} has another digest")));
        }
        parse_manifest(&self.name, &bytes)
    }

    fn oci(self, name: Option<&str>) -> Result<ImageSource, ImageError> {
        let index = parse_manifest(&self.name, &self.bytes("index.json", MAX_MANIFEST)?)?;
        let mut digest = self.choose(&index, name)?.digest.clone();
        let mut document = self.manifest(&digest)?;
        if document.is_index() {
            digest.clone_from(&platform_entry(&self.name, &document)?.digest);
            document = self.manifest(&digest)?;
        }
        check_kind(&self.name, &document)?;
        config_size(&self.name, &document.config)?;
        let config = self.bytes(&self.blob_name(&document.config.digest)?, MAX_CONFIG)?;
        check_config(&self.name, &document.config, &config)?;
        let layers = layers_of(&self.name, &document, &config)?;
        let places = layers.iter().map(|layer| self.place(&self.blob_name(&layer.digest)?));
        let places = places.collect::<Result<_, _>>()?;
        Ok(self.source(digest, config, layers, places))
    }

    fn place(&self, name: &str) -> Result<(u64, u64), ImageError> {
        let found = self.members.find(name);
        found.ok_or_else(|| invalid(&self.name, format!("{name} is missing in the archive")))
    }

    /// The entry with that name; the only one; or the only one for our platform.
    fn choose<'a>(&self, index: &'a Document, name: Option<&str>) -> Result<&'a Descriptor, ImageError> {
        if let Some(name) = name {
            let named =
                |entry: &&Descriptor| entry.annotations.get(REF_NAME).is_some_and(|found| found == name);
            let found = index.manifests.iter().find(named);
            return found.ok_or_else(|| invalid(&self.name, format!("it holds no image named {name:?}")));
        }
        match index.manifests.as_slice() {
            [only] => Ok(only),
            [] => Err(invalid(&self.name, "it holds no image")),
            several => {
                let here = crate::manifest::exact(several);
                here.ok_or_else(|| {
                    invalid(&self.name, format!("it holds {} images; name one", several.len()))
                })
            }
        }
    }

    fn docker(self, name: Option<&str>) -> Result<ImageSource, ImageError> {
        let bad = |why: String| invalid(&self.name, format!("manifest.json cannot be used: {why}"));
        let Node::List(images) = parse(&self.bytes("manifest.json", MAX_MANIFEST)?).map_err(bad)? else {
            return Err(bad("not a list".to_owned()));
        };
        let tagged = |image: &&Node| {
            let tags = image.list("RepoTags").unwrap_or_default();
            name.is_none_or(|name| tags.iter().any(|tag| *tag == Node::Text(name.to_owned())))
        };
        let fitting: Vec<&Node> = images.iter().filter(tagged).collect();
        let [image] = fitting.as_slice() else {
            return Err(invalid(
                &self.name,
                format!("{} of its images fit; name exactly one", fitting.len()),
            ));
        };
        let config = self.bytes(&image.text("Config").map_err(bad)?, MAX_CONFIG)?;
        let ids = diff_ids(&self.name, &config)?;
        let files = image.list("Layers").map_err(bad)?;
        if files.len() != ids.len() {
            return Err(bad(format!("{} layers but {} diff ids", files.len(), ids.len())));
        }
        let mut layers = Vec::new();
        let mut places = Vec::new();
        for (file, diff_id) in files.iter().zip(ids) {
            let Node::Text(file) = file else { return Err(bad("a layer is not a string".to_owned())) };
            let place = self.place(file)?;
            places.push(place);
            layers.push(self.docker_layer(place, diff_id)?);
        }
        let digest = digest::of(&config);
        Ok(self.source(digest, config, layers, places))
    }

    /// docker-save names no digest of the stored bytes; they are hashed, and the diff id is the judge.
    fn docker_layer(&self, place: (u64, u64), diff_id: String) -> Result<LayerRef, ImageError> {
        let mut slice = Slice { file: Arc::clone(&self.members.file), at: place.0, left: place.1 };
        let mut hasher = digest::Hasher::default();
        let mut buffer = vec![0_u8; 256 << 10];
        loop {
            let read = slice.read(&mut buffer);
            let read = read.map_err(|source| ImageError::Archive { path: self.name.clone(), source })?;
            if read == 0 {
                break;
            }
            hasher.update(&buffer[..read]);
        }
        let media_type = "application/vnd.docker.image.rootfs.diff.tar".to_owned();
        Ok(LayerRef { digest: hasher.finish(), media_type, size: place.1, diff_id })
    }

    fn source(
        self,
        digest: String,
        config: Bytes,
        layers: Vec<LayerRef>,
        places: Vec<(u64, u64)>,
    ) -> ImageSource {
        let origin = Origin::Archive(Slices { file: self.members.file, places });
        ImageSource { digest, config, layers, max_layer: MAX_LAYER, name: self.name, origin }
    }
}
