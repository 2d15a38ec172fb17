//! A layer as its uncompressed tar, verified while it is read.

use std::io::{self, BufRead as _, BufReader, Read};

use super::LayerRef;
use crate::digest::Hasher;

const BUFFER: usize = 256 << 10;

/// A layer's uncompressed tar. Errors of kind `InvalidData` mean that the layer is not what it should be.
pub struct LayerReader {
    decoder: Decoder,
    decoded: Hasher,
    stored_digest: String,
    stored_size: u64,
    diff_id: String,
    cap: u64,
    verified: bool,
}

impl std::fmt::Debug for LayerReader {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("LayerReader").field("digest", &self.stored_digest).finish_non_exhaustive()
    }
}

type Raw = BufReader<Counted>;

enum Decoder {
    Plain(Raw),
    Gzip(Box<flate2::bufread::MultiGzDecoder<Raw>>),
    Zstd(Box<zstd::Decoder<'static, Raw>>),
}

/// Hashes stored bytes on their way to the decoder.
struct Counted {
    inner: Box<dyn Read + Send>,
    hasher: Hasher,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        Ok(read)
    }
}

fn bad(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

impl LayerReader {
    /// Wraps stored bytes. The compression is taken from the bytes themselves; the digests decide.
    pub(super) fn new(inner: Box<dyn Read + Send>, layer: &LayerRef, cap: u64) -> io::Result<Self> {
        let mut raw = BufReader::with_capacity(BUFFER, Counted { inner, hasher: Hasher::default() });
        let decoder = match raw.fill_buf()? {
            [0x1f, 0x8b, ..] => Decoder::Gzip(Box::new(flate2::bufread::MultiGzDecoder::new(raw))),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Decoder::Zstd(Box::new(zstd::Decoder::with_buffer(raw)?)),
            _ => Decoder::Plain(raw),
        };
        Ok(Self {
            decoder,
            decoded: Hasher::default(),
            stored_digest: layer.digest.clone(),
            stored_size: layer.size,
            diff_id: layer.diff_id.clone(),
            cap,
            verified: false,
        })
    }

    /// Reads what is left (padding after the tar's end, for example) and says whether the layer is whole
    /// and genuine.
    pub fn finish(mut self) -> io::Result<()> {
        io::copy(&mut self, &mut io::sink()).map(|_| ())
    }

    fn verify(&mut self) -> io::Result<()> {
        let raw = match &mut self.decoder {
            Decoder::Plain(raw) => raw,
            Decoder::Gzip(decoder) => decoder.get_mut(),
            Decoder::Zstd(decoder) => decoder.get_mut(),
        };
        let digest = &self.stored_digest;
        if io::copy(raw, &mut io::sink())? > 0 {
            return Err(bad(format!("layer {digest} has bytes after its compressed data")));
        }
        let hasher = raw.get_ref().hasher.clone();
        let size = hasher.length();
        if size != self.stored_size {
            return Err(bad(format!("layer {digest} has {size} bytes, not {}", self.stored_size)));
        }
        if hasher.finish() != *digest {
            return Err(bad(format!("layer {digest} has another digest")));
        }
        let decoded = self.decoded.clone().finish();
        if decoded != self.diff_id {
            return Err(bad(format!("layer {digest} unpacks to {decoded}, not {}", self.diff_id)));
        }
        self.verified = true;
        Ok(())
    }
}

impl Read for LayerReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.verified || buffer.is_empty() {
            return Ok(0);
        }
        let read = match &mut self.decoder {
            Decoder::Plain(raw) => raw.read(buffer),
            Decoder::Gzip(decoder) => decoder.read(buffer),
            Decoder::Zstd(decoder) => decoder.read(buffer),
        }?;
        if read == 0 {
            return self.verify().map(|()| 0);
        }
        self.decoded.update(&buffer[..read]);
        if self.decoded.length() > self.cap {
            return Err(bad(format!("layer {} unpacks to more than {} bytes", self.stored_digest, self.cap)));
        }
        Ok(read)
    }
}
