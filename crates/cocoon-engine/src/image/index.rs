//! The image tables.
//!
//! Entry point: [`Index`]. A *blob* is one read-only disk, named by the hex digest of the layer that it
//! was made from (or of the merged layers). Boot files belong to the blob that brought them.

use std::path::Path;

use rusqlite::{Connection, OptionalExtension as _, Row, params};

use crate::{
    db::Db,
    error::{Fault, LookupError},
    model::Image,
};

/// Shortest digest prefix that may stand for an image.
const MIN_PREFIX: usize = "sha256:".len() + 3;

/// A blob's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blob {
    /// Name, 64 hex digits.
    pub(super) hex: String,
    /// Hex sha256 of the erofs file.
    pub(super) content: String,
    /// Bytes of the erofs file.
    pub(super) size: u64,
    /// Hex sha256 of the kernel it brought.
    pub(super) kernel: Option<String>,
    /// Hex sha256 of the initrd it brought.
    pub(super) initrd: Option<String>,
    /// First file that lost its setuid bit.
    pub(super) stripped: Option<String>,
}

/// An image's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// What users see.
    pub(super) image: Image,
    /// Blobs, lowest first.
    pub(super) blobs: Vec<String>,
    /// The blob with the kernel; with `initrd`, both or none.
    pub(super) kernel: Option<String>,
    /// The blob with the initrd.
    pub(super) initrd: Option<String>,
}

/// A boot bundle with its agent, as kept in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bundle {
    /// Its name, 64 hex digits.
    pub(super) hex: String,
    /// Hex sha256 of the kernel.
    pub(super) kernel: String,
    /// Hex sha256 of the initrd, agent included.
    pub(super) initrd: String,
}

/// The tables of this module.
#[derive(Debug, Clone)]
pub(super) struct Index {
    db: Db,
}

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS images (
        name TEXT PRIMARY KEY, digest TEXT NOT NULL, blobs TEXT NOT NULL, kernel TEXT, initrd TEXT,
        size INTEGER NOT NULL, created_at TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS image_blobs (
        hex TEXT PRIMARY KEY, content TEXT NOT NULL, size INTEGER NOT NULL,
        kernel TEXT, initrd TEXT, stripped TEXT);
    CREATE TABLE IF NOT EXISTS image_joined (layer TEXT PRIMARY KEY);
    CREATE TABLE IF NOT EXISTS image_bundles (
        hex TEXT PRIMARY KEY, stamp TEXT NOT NULL, kernel TEXT NOT NULL, initrd TEXT NOT NULL);";

impl Index {
    /// Creates the tables where they are missing.
    pub(super) async fn open(db: Db) -> Result<Self, Fault> {
        db.call("image tables", |connection| connection.execute_batch(TABLES)).await?;
        Ok(Self { db })
    }

    /// All images, by name.
    pub(super) async fn all(&self) -> Result<Vec<Entry>, Fault> {
        self.db
            .call("list images", |connection| {
                let mut query = connection.prepare("SELECT * FROM images ORDER BY name")?;
                query.query_map([], entry)?.collect()
            })
            .await
    }

    /// One image by exact name, or by `sha256:` and at least three digits of its digest.
    pub(super) async fn find(&self, wanted: &str) -> Result<Entry, LookupError> {
        let (all, wanted) = (self.all().await?, wanted.to_owned());
        if let Some(found) = all.iter().find(|entry| entry.image.name == wanted) {
            return Ok(found.clone());
        }
        let mut by_digest =
            all.into_iter().filter(|entry| wanted.len() >= MIN_PREFIX && entry.image.id.starts_with(&wanted));
        let Some(first) = by_digest.next() else { return Err(LookupError::ImageNotFound(wanted)) };
        if by_digest.any(|other| other.image.id != first.image.id) {
            return Err(LookupError::Ambiguous(wanted));
        }
        Ok(first)
    }

    /// Stores an image, replacing the one of that name. `held` is kept until that is done, also when nobody
    /// waits for it any more.
    pub(super) async fn put(&self, new: Entry, held: impl Send + 'static) -> Result<(), Fault> {
        let step = format!("record image {}", new.image.name);
        self.db
            .call(&step, move |connection| {
                let _held = held;
                connection.execute(
                    "INSERT OR REPLACE INTO images VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                    params![
                        new.image.name,
                        new.image.id,
                        new.blobs.join(" "),
                        new.kernel,
                        new.initrd,
                        signed(new.image.size),
                        new.image.created_at.to_string(),
                    ],
                )
            })
            .await
            .map(drop)
    }

    /// Forgets an image by name.
    pub(super) async fn remove(&self, name: String) -> Result<(), Fault> {
        let step = format!("forget image {name}");
        self.db.call(&step, move |c| c.execute("DELETE FROM images WHERE name = ?1", [name])).await.map(drop)
    }

    /// A blob's row.
    pub(super) async fn blob(&self, hex: &str) -> Result<Option<Blob>, Fault> {
        let hex = hex.to_owned();
        self.db
            .call("read image blob", move |c| {
                c.query_row("SELECT * FROM image_blobs WHERE hex = ?1", [hex], blob).optional()
            })
            .await
    }

    /// Stores a blob's row.
    pub(super) async fn put_blob(&self, new: Blob) -> Result<(), Fault> {
        self.db
            .call("record image blob", move |c| {
                c.execute(
                    "INSERT OR REPLACE INTO image_blobs VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                    params![new.hex, new.content, signed(new.size), new.kernel, new.initrd, new.stripped],
                )
            })
            .await
            .map(drop)
    }

    /// The blob that brought a boot file with this digest. `column` is `kernel` or `initrd`.
    pub(super) async fn bringer(
        &self,
        column: super::unpack::Boot,
        digest: &str,
    ) -> Result<Option<String>, Fault> {
        let query = match column {
            super::unpack::Boot::Kernel => "SELECT hex FROM image_blobs WHERE kernel = ?1",
            super::unpack::Boot::Initrd => "SELECT hex FROM image_blobs WHERE initrd = ?1",
        };
        let digest = digest.to_owned();
        self.db
            .call("find boot file", move |c| c.query_row(query, [digest], |row| row.get(0)).optional())
            .await
    }

    /// Whether one of the layers is known not to stand alone.
    pub(super) async fn any_joined(&self, layers: &[String]) -> Result<bool, Fault> {
        let layers = layers.to_vec();
        self.db
            .call("read layers", move |c| {
                let mut query = c.prepare("SELECT 1 FROM image_joined WHERE layer = ?1")?;
                for layer in layers {
                    if query.exists([layer])? {
                        return Ok(true);
                    }
                }
                Ok(false)
            })
            .await
    }

    /// Remembers that a layer does not stand alone.
    pub(super) async fn put_joined(&self, layer: String) -> Result<(), Fault> {
        self.db
            .call("record layer", move |c| {
                c.execute("INSERT OR IGNORE INTO image_joined VALUES (?1)", [layer])
            })
            .await
            .map(drop)
    }

    /// The bundle made from files in this state.
    pub(super) async fn bundle_by_stamp(&self, stamp: String) -> Result<Option<Bundle>, Fault> {
        self.bundle("SELECT * FROM image_bundles WHERE stamp = ?1", vec![stamp]).await
    }

    /// The bundle with these boot files.
    pub(super) async fn bundle_by_files(&self, kernel: &str, initrd: &str) -> Result<Option<Bundle>, Fault> {
        let query = "SELECT * FROM image_bundles WHERE kernel = ?1 AND initrd = ?2";
        self.bundle(query, vec![kernel.to_owned(), initrd.to_owned()]).await
    }

    async fn bundle(&self, query: &'static str, by: Vec<String>) -> Result<Option<Bundle>, Fault> {
        self.db
            .call("read boot bundle", move |c| {
                c.query_row(query, rusqlite::params_from_iter(by), |row| {
                    Ok(Bundle {
                        hex: row.get("hex")?,
                        kernel: row.get("kernel")?,
                        initrd: row.get("initrd")?,
                    })
                })
                .optional()
            })
            .await
    }

    /// Stores a bundle's row.
    pub(super) async fn put_bundle(&self, new: Bundle, stamp: String) -> Result<(), Fault> {
        self.db
            .call("record boot bundle", move |c| {
                c.execute(
                    "INSERT OR REPLACE INTO image_bundles VALUES (?1, ?2, ?3, ?4)",
                    params![new.hex, stamp, new.kernel, new.initrd],
                )
            })
            .await
            .map(drop)
    }

    /// Forgets rows whose files are gone.
    pub(super) async fn prune(&self, blobs: &Path, boot: &Path) -> Result<(), Fault> {
        let (blobs, boot) = (blobs.to_owned(), boot.to_owned());
        self.db
            .call("prune image tables", move |connection| {
                let change = connection.transaction()?;
                for hex in hexes(&change, "SELECT hex FROM image_blobs")? {
                    if !blobs.join(format!("{hex}.erofs")).exists() {
                        change.execute("DELETE FROM image_blobs WHERE hex = ?1", [hex])?;
                    }
                }
                for hex in hexes(&change, "SELECT hex FROM image_bundles")? {
                    if !boot.join(super::boot::bundle_folder(&hex)).exists() {
                        change.execute("DELETE FROM image_bundles WHERE hex = ?1", [hex])?;
                    }
                }
                change.commit()
            })
            .await
    }
}

fn hexes(connection: &Connection, query: &str) -> rusqlite::Result<Vec<String>> {
    connection.prepare(query)?.query_map([], |row| row.get(0))?.collect()
}

fn blob(row: &Row<'_>) -> rusqlite::Result<Blob> {
    Ok(Blob {
        hex: row.get("hex")?,
        content: row.get("content")?,
        size: unsigned(row.get("size")?),
        kernel: row.get("kernel")?,
        initrd: row.get("initrd")?,
        stripped: row.get("stripped")?,
    })
}

fn entry(row: &Row<'_>) -> rusqlite::Result<Entry> {
    let (blobs, created): (String, String) = (row.get("blobs")?, row.get("created_at")?);
    Ok(Entry {
        image: Image {
            id: row.get("digest")?,
            name: row.get("name")?,
            kind: "oci".to_owned(),
            size: unsigned(row.get("size")?),
            created_at: created.parse().map_err(|error| {
                rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error))
            })?,
        },
        blobs: blobs.split(' ').filter(|hex| !hex.is_empty()).map(ToOwned::to_owned).collect(),
        kernel: row.get("kernel")?,
        initrd: row.get("initrd")?,
    })
}

/// SQLite has signed integers; no file is that long.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}
