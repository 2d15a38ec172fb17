//! What an archive may not do, one handmade tar a rule. Needs root (owners are kept).

use std::{io::Write as _, os::unix::fs::MetadataExt as _, path::Path};

use tar::{Builder, EntryType, Header};

use super::*;

const ALONE: Place = Place::Alone { lowest: true };

/// A tar under construction, byte for byte as an attacker could write it.
#[derive(Default)]
struct Archive(Vec<u8>);

impl Archive {
    fn add(mut self, kind: EntryType, name: &str, link: &str, mode: u32, body: &[u8]) -> Self {
        let mut header = Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(body.len() as u64);
        header.set_uid(7);
        header.set_gid(8);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(body);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &str, body: &str) -> Self {
        self.add(EntryType::Regular, name, "", 0o644, body.as_bytes())
    }

    fn folder(self, name: &str) -> Self {
        self.add(EntryType::Directory, name, "", 0o755, b"")
    }

    fn pax(self, key: &str, value: &[u8]) -> Self {
        let rest = key.len() + value.len() + 3;
        let length =
            (1..9).map(|digits| rest + digits).find(|all| all.to_string().len() + rest == *all).unwrap();
        let mut record = format!("{length} {key}=").into_bytes();
        record.extend_from_slice(value);
        record.push(b'\n');
        self.add(EntryType::XHeader, "pax", "", 0o644, &record)
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend_from_slice(&[0; 1024]);
        self.0
    }
}

fn unpacker(root: &Path, setuid: Setuid) -> Unpacker {
    Unpacker::new(Tree::open(root).unwrap(), setuid)
}

fn unpack_with(
    root: &Path,
    archive: &[u8],
    setuid: Setuid,
    budget: &mut Budget,
) -> Result<Unpacker, LayerError> {
    let mut unpacker = unpacker(root, setuid);
    unpacker.layer(&mut &*archive, budget, ALONE)?;
    Ok(unpacker)
}

fn unpack(root: &Path, archive: &[u8]) -> Result<Unpacker, LayerError> {
    unpack_with(root, archive, Setuid::Refuse, &mut Budget::new(1 << 30))
}

fn tree() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("tree");
    std::fs::create_dir(&root).unwrap();
    (folder, root)
}

/// Everything beside the tree, which must stay as it is.
fn outside(folder: &Path) -> Vec<String> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn hostile_entries_are_refused_and_nothing_leaves_the_tree() {
    let link = |name, target| Archive::default().add(EntryType::Symlink, name, target, 0o777, b"");
    let hard = |name, target| Archive::default().add(EntryType::Link, name, target, 0o644, b"");
    let odd = |kind: u8| Archive::default().add(EntryType::new(kind), "odd", "", 0o644, b"");
    let cases: Vec<(&str, Archive, &str)> = vec![
        ("parent in a path", Archive::default().file("a/../../out", "x"), "`..`"),
        ("parent alone", Archive::default().file("..", "x"), "`..`"),
        ("absolute path", Archive::default().file("/out", "x"), "absolute"),
        ("absolute path in pax", Archive::default().pax("path", b"/out").file("in", "x"), "absolute"),
        ("parent in pax", Archive::default().pax("path", b"../out").file("in", "x"), "`..`"),
        (
            "parent in a GNU long name",
            Archive::default().add(EntryType::GNULongName, "l", "", 0, b"../out\0").file("in", "x"),
            "`..`",
        ),
        ("file through a link", link("way", "/tmp").file("way/out", "x"), "symbolic link"),
        ("file through a relative link", link("a/way", "../b").file("a/way/out", "x"), "symbolic link"),
        ("folder through a link", link("way", "/tmp").folder("way/out/"), "symbolic link"),
        ("link out", link("way", "../../etc"), "out of the image"),
        ("link out, deeper", link("a/b/way", "../../../etc"), "out of the image"),
        ("hard link out", hard("h", "../../etc/passwd"), "`..`"),
        ("absolute hard link", hard("h", "/etc/passwd"), "absolute"),
        (
            "hard link through a link",
            link("way", "/etc").add(EntryType::Link, "h", "way/passwd", 0o644, b""),
            "symbolic link",
        ),
        ("hard link to nothing", hard("h", "gone"), "does not have"),
        (
            "hard link to a folder",
            Archive::default().folder("d/").add(EntryType::Link, "h", "d", 0o644, b""),
            "not a file",
        ),
        (
            "character device",
            Archive::default().add(EntryType::Char, "null", "", 0o666, b""),
            "device node; a guest mounts a /dev of its own, so drop",
        ),
        (
            "block device",
            Archive::default().add(EntryType::Block, "sda", "", 0o660, b""),
            "device node; a guest mounts a /dev of its own, so drop",
        ),
        ("named pipe", Archive::default().add(EntryType::Fifo, "pipe", "", 0o644, b""), "pipe"),
        ("setuid", Archive::default().add(EntryType::Regular, "su", "", 0o4755, b"x"), "setuid"),
        ("setgid", Archive::default().add(EntryType::Regular, "wall", "", 0o2755, b"x"), "setgid"),
        (
            "file capabilities",
            Archive::default().pax("SCHILY.xattr.security.capability", b"\x01\n").file("ping", "x"),
            "capabilities",
        ),
        ("old GNU sparse", Archive::default().add(EntryType::GNUSparse, "s", "", 0o644, b""), "sparse"),
        ("pax sparse", Archive::default().pax("GNU.sparse.realsize", b"9999999999").file("s", "x"), "sparse"),
        ("two sizes", Archive::default().pax("size", b"1024").file("s", "x"), "disagree"),
        (
            "malformed pax",
            Archive::default().add(EntryType::XHeader, "p", "", 0, b"nonsense").file("s", "x"),
            "malformed",
        ),
        (
            "global pax that renames",
            Archive::default().add(EntryType::XGlobalHeader, "g", "", 0, b"10 path=x\n").file("s", "x"),
            "all entries",
        ),
        ("unknown type", odd(b'Z'), "unknown entry type"),
        ("a NUL in pax", Archive::default().pax("path", b"a\0b").file("in", "x"), "NUL"),
        (
            "a file over the root",
            Archive::default().file("./", "x").add(EntryType::Symlink, ".", "x", 0o777, b""),
            "root",
        ),
        ("whiteout of the parent", Archive::default().file("a/.wh...", ""), "whiteout"),
        ("a file below a file", Archive::default().file("f", "x").file("f/g", "x"), "not a folder"),
    ];
    for (what, archive, word) in cases {
        let (folder, root) = tree();
        match unpack(&root, &archive.end()) {
            Err(LayerError::Hostile { reason, .. }) => assert!(reason.contains(word), "{what}: {reason}"),
            other => panic!("{what}: not refused: {:?}", other.map(|_| ())),
        }
        assert_eq!(outside(folder.path()), ["tree"], "{what}");
    }
    assert!(!Path::new("/tmp/out").exists());
}

#[test]
fn bombs_are_stopped_by_the_budget() {
    let many = (0..50).fold(Archive::default(), |archive, at| archive.file(&format!("f{at}"), ""));
    let big = Archive::default().file("big", &"x".repeat(100_000));
    let tail = Archive::default().file("small", "x");
    let with_tail = [tail.end(), vec![1; 100_000]].concat();
    let long =
        Archive::default().add(EntryType::XHeader, "p", "", 0, &vec![b'1'; (1 << 20) + 1]).file("f", "");
    for (what, archive, budget, word) in [
        ("entries", many.end(), Budget { entries: 40, ..Budget::new(1 << 20) }, "more entries"),
        ("bytes", big.end(), Budget::new(50_000), "more unpacked bytes"),
        ("bytes after the end marker", with_tail, Budget::new(50_000), "more unpacked bytes"),
        (
            "names",
            Archive::default().file("abcdefghij", "").end(),
            Budget { names: 5, ..Budget::new(1 << 20) },
            "names",
        ),
        ("a long extension header", long.end(), Budget::new(1 << 30), "1 MiB"),
    ] {
        let (_folder, root) = tree();
        match unpack_with(&root, &archive, Setuid::Refuse, &mut { budget }) {
            Err(LayerError::Hostile { reason, .. }) => assert!(reason.contains(word), "{what}: {reason}"),
            other => panic!("{what}: not refused: {:?}", other.map(|_| ())),
        }
    }
}

#[test]
fn an_archive_that_ends_early_is_refused() {
    let whole = Archive::default().file("a", &"x".repeat(2000)).end();
    let (_folder, root) = tree();
    assert!(unpack(&root, &whole[..1200]).is_err());
}

#[test]
fn what_is_taken_keeps_owner_mode_content_links_and_holes() {
    let zeros = "\0".repeat(1 << 20);
    let archive = Archive::default()
        .folder("./")
        .folder("./d/")
        .add(EntryType::Regular, "./d/run", "", 0o1751, b"#!/bin/sh\n")
        .add(EntryType::Link, "again", "./d/run", 0o1751, b"")
        .add(EntryType::Symlink, "s", "/d/run", 0o777, b"")
        .add(EntryType::Directory, "mail", "", 0o2775, b"")
        .file("zeros", &zeros)
        .pax("path", b"t\xffx")
        .file("in", "not UTF-8")
        .end();
    let (_folder, root) = tree();
    unpack(&root, &archive).unwrap();
    let run = std::fs::metadata(root.join("d/run")).unwrap();
    assert_eq!((run.uid(), run.gid(), run.mode() & 0o7777, run.nlink()), (7, 8, 0o1751, 2), "run as root");
    assert_eq!(std::fs::read_link(root.join("s")).unwrap(), Path::new("/d/run"));
    assert_eq!(std::fs::metadata(root.join("mail")).unwrap().mode() & 0o7777, 0o2775);
    let holes = std::fs::metadata(root.join("zeros")).unwrap();
    assert_eq!((holes.len(), holes.blocks()), (1 << 20, 0));
    let odd = std::os::unix::ffi::OsStrExt::as_bytes(path::os_string(b"t\xffx").as_os_str()).to_vec();
    assert_eq!(std::fs::read(root.join(path::os_string(&odd))).unwrap(), b"not UTF-8");
}

#[test]
fn the_last_entry_of_a_name_wins_whatever_its_kind() {
    let archive = Archive::default()
        .file("a/b/c", "deep")
        .add(EntryType::Symlink, "a", "elsewhere", 0o777, b"")
        .file("x", "one")
        .folder("x/")
        .file("x/y", "two")
        .add(EntryType::Symlink, "z", "x", 0o777, b"")
        .file("z", "three")
        .end();
    let (_folder, root) = tree();
    unpack(&root, &archive).unwrap();
    assert_eq!(std::fs::read_link(root.join("a")).unwrap(), Path::new("elsewhere"));
    assert_eq!(std::fs::read(root.join("x/y")).unwrap(), b"two");
    assert_eq!(std::fs::read(root.join("z")).unwrap(), b"three");
}

#[test]
fn stripping_takes_the_rights_off_and_remembers_the_first_file() {
    let archive = Archive::default()
        .add(EntryType::Regular, "bin/su", "", 0o4755, b"x")
        .pax("SCHILY.xattr.security.capability", b"\x01\x00")
        .file("bin/ping", "x")
        .end();
    let (_folder, root) = tree();
    let done = unpack_with(&root, &archive, Setuid::Strip, &mut Budget::new(1 << 20)).unwrap();
    assert_eq!(done.stripped(), Some("bin/su"));
    assert_eq!(std::fs::metadata(root.join("bin/su")).unwrap().mode() & 0o7777, 0o755);
    assert_eq!(xattr::list(root.join("bin/ping")).unwrap().count(), 0);
}

#[test]
fn a_layer_that_needs_the_ones_below_says_so() {
    let whiteout = Archive::default().file("etc/.wh.motd", "").end();
    let link = Archive::default().add(EntryType::Link, "h", "below", 0o644, b"").end();
    for archive in [whiteout, link] {
        let (_folder, root) = tree();
        let mut unpacker = unpacker(&root, Setuid::Refuse);
        let done = unpacker.layer(&mut &*archive, &mut Budget::new(1 << 20), Place::Alone { lowest: false });
        assert!(matches!(done, Err(LayerError::NeedsLower)), "{done:?}");
    }
    let (_folder, root) = tree();
    unpack(&root, &Archive::default().file(".wh.nothing", "").file("a", "").end()).unwrap();
    assert!(!root.join(".wh.nothing").exists());
}

#[test]
fn merged_whiteouts_hide_lower_layers_and_never_their_own() {
    let lower = Archive::default()
        .file("etc/motd", "old")
        .file("etc/keep", "old")
        .file("opt/a/old", "")
        .file("opt/b/old", "")
        .file("gone/x/y", "")
        .file("replaced", "file")
        .end();
    let upper = Archive::default()
        .file("etc/.wh.motd", "")
        .file("opt/a/new", "new")
        .file("opt/.wh..wh..opq", "")
        .file(".wh.gone", "")
        .file(".wh..wh.plnk", "")
        .folder("replaced/")
        .file("replaced/in", "new")
        .file(".wh.replaced", "")
        .end();
    let (_folder, root) = tree();
    let mut unpacker = unpacker(&root, Setuid::Refuse);
    let mut budget = Budget::new(1 << 20);
    for layer in [lower, upper] {
        unpacker.layer(&mut &*layer, &mut budget, Place::Merged).unwrap();
    }
    let mut left: Vec<_> = walkdir::WalkDir::new(&root)
        .into_iter()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().is_file())
        .map(|entry| entry.path().strip_prefix(&root).unwrap().display().to_string())
        .collect();
    left.sort();
    assert_eq!(left, ["etc/keep", "opt/a/new", "replaced/in"]);
}

#[test]
fn boot_files_are_the_last_regular_ones_in_the_root_or_boot() {
    let archive = Archive::default()
        .file("vmlinuz", "root")
        .file("boot/vmlinuz-1", "one")
        .file("boot/vmlinuz-2", "two")
        .file("boot/vmlinuz-2.old", "old")
        .file("boot/deeper/vmlinuz", "deeper")
        .add(EntryType::Symlink, "vmlinuz-link", "boot/vmlinuz-2", 0o777, b"")
        .file("initrd.img", "initrd")
        .file("usr/initrd.img", "no")
        .end();
    let (_folder, root) = tree();
    let mut done = unpack(&root, &archive).unwrap();
    let mut content = |kind| std::io::read_to_string(done.boot_file(kind).unwrap().unwrap()).unwrap();
    assert_eq!((content(Boot::Kernel), content(Boot::Initrd)), ("two".to_owned(), "initrd".to_owned()));
}

#[test]
fn an_ordinary_tar_program_is_understood() {
    let mut builder = Builder::new(Vec::new());
    let deep = format!("{}/file", ["folder-with-a-long-name"; 12].join("/"));
    let mut header = Header::new_gnu();
    header.set_size(3);
    header.set_mode(0o644);
    builder.append_data(&mut header, &deep, &b"abc"[..]).unwrap();
    let mut archive = builder.into_inner().unwrap();
    archive.flush().unwrap();
    let (_folder, root) = tree();
    unpack(&root, &archive).unwrap();
    assert_eq!(std::fs::read(root.join(deep)).unwrap(), b"abc");
}
