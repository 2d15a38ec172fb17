//! The lease file (`spec/cocoon-net.md` §2): exact format, a reader that follows changes, and the
//! client of the control socket.
//!
//! Entry points: [`lookup`], [`LeaseReader`], [`release`]; for the daemon [`parse`] and [`render`].
//! Format: a JSON array of `{mac, ip, expiry}`, two-space indent, no final newline; ours is UTC and
//! writes an empty set as `[]`; `null` and local offsets are read too. Invariants: a row that lapsed, or
//! whose address two live rows claim, resolves to nothing; a file that is not a lease file is an error.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{control, names::Mac};

/// A lease file is never longer than this.
const MAX_FILE: u64 = 16 << 20;

/// One row: a MAC owns an address until `expiry`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Lower case, colon-separated.
    pub mac: String,
    /// The address.
    pub ip: Ipv4Addr,
    /// End of the lease.
    pub expiry: Timestamp,
}

/// Why leases could not be read, written or released.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The file is there and is not a lease file.
    #[error(
        "lease file {path} is corrupt: {message}; move it away, and the addresses in use are taken from the packet filter"
    )]
    Corrupt {
        /// Which file.
        path: String,
        /// What is wrong.
        message: String,
    },
    /// The file or the socket failed.
    #[error("lease file or control socket {path}")]
    Io {
        /// Which.
        path: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The daemon refused the release.
    #[error("the network daemon refused to release {mac}: {message}")]
    Refused {
        /// Whose lease.
        mac: String,
        /// Why.
        message: String,
    },
}

#[derive(Serialize, Deserialize)]
struct Row {
    #[serde(default)]
    mac: String,
    #[serde(default)]
    ip: String,
    #[serde(default)]
    expiry: String,
}

/// What a lease file says: rows that make sense, in file order, and the addresses of rows that do not.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Parsed {
    /// Rows with a MAC, an IPv4 address and a time, lapsed ones too. MACs are lower case.
    pub leases: Vec<Lease>,
    /// Addresses named by rows whose MAC or time cannot be read: somebody may own them.
    pub doubtful: Vec<Ipv4Addr>,
}

impl Parsed {
    /// The live rows by MAC. Of two rows of one MAC the last counts.
    #[must_use]
    pub fn live(&self, now: Timestamp) -> BTreeMap<String, Lease> {
        let live = self.leases.iter().filter(|lease| lease.expiry > now);
        live.map(|lease| (lease.mac.clone(), lease.clone())).collect()
    }

    /// As [`Self::live`], with those that have lapsed.
    #[must_use]
    pub fn all(&self) -> BTreeMap<String, Lease> {
        self.live(Timestamp::MIN)
    }

    /// The address of `mac` at `now`, unless another MAC's live row claims the same address.
    #[must_use]
    pub fn resolve(&self, mac: &str, now: Timestamp) -> Option<Ipv4Addr> {
        let live = self.live(now);
        let ip = live.get(&mac.to_ascii_lowercase())?.ip;
        (live.values().filter(|lease| lease.ip == ip).count() == 1).then_some(ip)
    }
}

/// Reads the text of a lease file. The error says why it is not one.
pub fn parse(text: &str) -> Result<Parsed, String> {
    let rows: Option<Vec<Row>> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut parsed = Parsed::default();
    for row in rows.unwrap_or_default() {
        let Ok(ip) = row.ip.parse::<Ipv4Addr>() else { continue };
        match (row.mac.parse::<Mac>(), row.expiry.parse::<Timestamp>()) {
            (Ok(mac), Ok(expiry)) => parsed.leases.push(Lease { mac: mac.to_string(), ip, expiry }),
            _ => parsed.doubtful.push(ip),
        }
    }
    Ok(parsed)
}

/// The text of a lease file.
#[must_use]
pub fn render<'a>(leases: impl IntoIterator<Item = &'a Lease>) -> String {
    let rows = leases.into_iter().map(|lease| Row {
        mac: lease.mac.clone(),
        ip: lease.ip.to_string(),
        expiry: lease.expiry.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    });
    serde_json::to_string_pretty(&rows.collect::<Vec<_>>())
        .expect("rows of three strings are always valid JSON")
}

/// Reads a lease file. A missing file has no rows.
pub fn load(file: &Path) -> Result<Parsed, LeaseError> {
    let path = || file.display().to_string();
    let corrupt = |message: String| LeaseError::Corrupt { path: path(), message };
    let text = match read(file) {
        Ok(Some(text)) => text,
        Ok(None) => return Err(corrupt(format!("it is longer than {MAX_FILE} bytes"))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Parsed::default()),
        Err(source) => return Err(LeaseError::Io { path: path(), source }),
    };
    let text = String::from_utf8(text).map_err(|_| corrupt("it is not UTF-8 text".to_owned()))?;
    parse(&text).map_err(corrupt)
}

/// The content; `None` if there is too much of it.
fn read(file: &Path) -> std::io::Result<Option<Vec<u8>>> {
    use std::io::Read as _;
    let mut text = Vec::new();
    std::fs::File::open(file)?.take(MAX_FILE + 1).read_to_end(&mut text)?;
    Ok((text.len() as u64 <= MAX_FILE).then_some(text))
}

/// Replaces a lease file; durable when it returns.
pub fn save<'a>(file: &Path, leases: impl IntoIterator<Item = &'a Lease>) -> Result<(), LeaseError> {
    cocoon_kit::files::replace(file, render(leases).as_bytes(), 0o644)
        .map_err(|source| LeaseError::Io { path: file.display().to_string(), source })
}

/// The address that `mac` holds at `now`. `None`: no live row, or two MACs claim the same address.
/// A missing file has no rows.
pub fn lookup(file: &Path, mac: &str, now: Timestamp) -> Result<Option<Ipv4Addr>, LeaseError> {
    Ok(load(file)?.resolve(mac, now))
}

/// A reader that parses the file again only when it changed: for callers that ask often.
#[derive(Debug)]
pub struct LeaseReader {
    file: PathBuf,
    /// Device, inode, size and time of what `parsed` came from.
    seen: Option<(u64, u64, u64, i64, i64)>,
    parsed: Parsed,
}

impl LeaseReader {
    /// A reader of `file`, which need not exist yet.
    #[must_use]
    pub fn new(file: impl Into<PathBuf>) -> Self {
        Self { file: file.into(), seen: None, parsed: Parsed::default() }
    }

    /// As [`lookup`].
    pub fn lookup(&mut self, mac: &str, now: Timestamp) -> Result<Option<Ipv4Addr>, LeaseError> {
        self.follow()?;
        Ok(self.parsed.resolve(mac, now))
    }

    /// The MACs that hold a lease at `now`, contested addresses too. A missing file has none.
    pub fn held(&mut self, now: Timestamp) -> Result<Vec<String>, LeaseError> {
        self.follow()?;
        Ok(self.parsed.live(now).into_keys().collect())
    }

    fn follow(&mut self) -> Result<(), LeaseError> {
        let seen = std::fs::metadata(&self.file)
            .ok()
            .map(|found| (found.dev(), found.ino(), found.size(), found.mtime(), found.mtime_nsec()));
        if seen.is_none() || seen != self.seen {
            self.seen = None;
            self.parsed = load(&self.file)?;
            self.seen = seen;
        }
        Ok(())
    }
}

/// Asks the daemon to forget the lease of `mac`. No lease is success.
pub async fn release(control_socket: &Path, mac: &str) -> Result<(), LeaseError> {
    let answer = control::ask(control_socket, &control::Request::Release { release: mac.to_owned() })
        .await
        .map_err(|source| LeaseError::Io { path: control_socket.display().to_string(), source })?;
    match answer.error {
        None => Ok(()),
        Some(message) => Err(LeaseError::Refused { mac: mac.to_owned(), message }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lease(mac: &str, ip: &str, expiry: &str) -> Lease {
        Lease { mac: mac.to_owned(), ip: ip.parse().unwrap(), expiry: expiry.parse().unwrap() }
    }

    fn now() -> Timestamp {
        "2026-01-02T00:00:00Z".parse().unwrap()
    }

    const A: &str = "52:54:00:ab:cd:01";
    const B: &str = "52:54:00:ab:cd:02";

    #[test]
    fn the_file_has_exactly_the_documented_form() {
        let rows = [lease(A, "172.20.100.17", "2026-01-03T03:04:05.9Z")];
        let expected = "[\n  {\n    \"mac\": \"52:54:00:ab:cd:01\",\n    \"ip\": \"172.20.100.17\",\n    \"expiry\": \"2026-01-03T03:04:05Z\"\n  }\n]";
        assert_eq!(render(&rows), expected);
        assert_eq!(render([]), "[]");
    }

    #[test]
    fn null_local_offsets_and_bad_rows_are_read_and_other_things_are_corrupt() {
        assert_eq!(parse("null"), Ok(Parsed::default()));
        let text = r#"[{"mac":"52:54:00:AB:CD:01","ip":"10.0.0.9","expiry":"2026-01-03T03:04:05+08:00","more":1},
            {"mac":"bad","ip":"10.0.0.8","expiry":"2026-01-03T03:04:05Z"},{"mac":"52:54:00:ab:cd:02","ip":"fd00::1","expiry":"x"}]"#;
        let parsed = parse(text).unwrap();
        assert_eq!(parsed.leases, [lease(A, "10.0.0.9", "2026-01-02T19:04:05Z")]);
        assert_eq!(parsed.doubtful, [Ipv4Addr::new(10, 0, 0, 8)]);
        for corrupt in ["", "{}", "[", "[1]", r#"[{"mac":5}]"#, "[] []"] {
            assert!(parse(corrupt).is_err(), "{corrupt}");
        }
    }

    #[test]
    fn lapsed_rows_and_contested_addresses_resolve_to_nothing() {
        let leases =
            vec![lease(A, "10.0.0.2", "2026-01-01T00:00:00Z"), lease(B, "10.0.0.2", "2026-01-03T00:00:00Z")];
        let mut parsed = Parsed { leases, doubtful: vec![] };
        assert_eq!(parsed.resolve(A, now()), None);
        assert_eq!(parsed.resolve(&B.to_uppercase(), now()), Some(Ipv4Addr::new(10, 0, 0, 2)));
        parsed.leases.push(lease(A, "10.0.0.2", "2026-01-04T00:00:00Z"));
        assert_eq!(parsed.resolve(B, now()), None, "two live MACs on one address");
        parsed.leases.push(lease(A, "10.0.0.3", "2026-01-04T00:00:00Z"));
        assert_eq!(
            parsed.resolve(A, now()),
            Some(Ipv4Addr::new(10, 0, 0, 3)),
            "the last row of a MAC counts"
        );
    }

    #[test]
    fn who_holds_a_lease_is_told_and_who_held_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("leases.json");
        let mut reader = LeaseReader::new(&file);
        assert_eq!(reader.held(now()).unwrap(), Vec::<String>::new(), "no file");
        let lapsed = lease(A, "10.0.0.2", "2026-01-01T00:00:00Z");
        save(&file, &[lapsed, lease(B, "10.0.0.3", "2026-01-03T00:00:00Z")]).unwrap();
        assert_eq!(reader.held(now()).unwrap(), [B]);
        std::fs::write(&file, "garbage").unwrap();
        assert!(reader.held(now()).is_err());
    }

    #[test]
    fn a_reader_follows_the_file_and_a_corrupt_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("leases.json");
        let mut reader = LeaseReader::new(&file);
        assert_eq!(reader.lookup(A, now()).unwrap(), None);
        for ip in ["10.0.0.2", "10.0.0.3"] {
            save(&file, &[lease(A, ip, "2026-01-03T00:00:00Z")]).unwrap();
            assert_eq!(reader.lookup(A, now()).unwrap(), ip.parse().ok());
            assert_eq!(lookup(&file, A, now()).unwrap(), ip.parse().ok());
        }
        std::fs::write(&file, "garbage").unwrap();
        for _ in 0..2 {
            let error = reader.lookup(A, now()).unwrap_err().to_string();
            assert!(error.contains("leases.json") && error.contains("move it away"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in ".{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn what_is_written_is_read_back(rows in prop::collection::vec((any::<[u8; 6]>(), any::<u32>(), 0..4_000_000_000_i64), 0..8)) {
            let leases: Vec<Lease> = rows.into_iter().map(|(mac, ip, at)| Lease {
                mac: Mac::new(mac).to_string(),
                ip: ip.into(),
                expiry: Timestamp::from_second(at).unwrap(),
            }).collect();
            prop_assert_eq!(parse(&render(&leases)).unwrap().leases, leases);
        }
    }
}
