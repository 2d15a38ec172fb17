//! Which processes belong to a lab.
//!
//! Entry points: [`in_namespace`], [`holders`]. A hypervisor has a network namespace of its own, so the
//! lab's says nothing of it; it is found by what it holds of the lab's folder.

use std::{
    path::Path,
    process::{Command, Stdio},
};

/// The first user that a hypervisor of ours may run as; no person has one so high.
const FIRST_GUEST_USER: u32 = 3_000_000;

/// Processes in a network namespace.
pub(super) fn in_namespace(name: &str) -> Vec<u32> {
    let output = Command::new("ip").args(["netns", "pids", name]).stdin(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Processes that work in `folder`, have a file of it open or name it on their command line. This process
/// and those that it comes from are not among them.
pub(super) fn holders(folder: &Path) -> Vec<u32> {
    let own = ancestry(std::process::id());
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| !own.contains(pid) && holds(*pid, folder)).collect()
}

/// Whether a process runs as a user that only hypervisors of ours and their helpers have.
pub(super) fn is_guest(pid: u32) -> bool {
    let field = status(pid, "Uid:");
    field.is_some_and(|uid| uid >= FIRST_GUEST_USER)
}

fn holds(pid: u32, folder: &Path) -> bool {
    let process = Path::new("/proc").join(pid.to_string());
    let below = |link: &Path| std::fs::read_link(link).is_ok_and(|target| target.starts_with(folder));
    let open = |entry: std::io::Result<std::fs::DirEntry>| entry.is_ok_and(|entry| below(&entry.path()));
    below(&process.join("cwd"))
        || std::fs::read_dir(process.join("fd")).is_ok_and(|mut files| files.any(open))
        || std::fs::read(process.join("cmdline"))
            .is_ok_and(|line| names(&String::from_utf8_lossy(&line), folder))
}

/// Whether a command line has the folder's path in it, and not only that of a longer name.
fn names(line: &str, folder: &Path) -> bool {
    let folder = folder.display().to_string();
    let ends = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.'));
    line.match_indices(&folder).any(|(at, found)| line.get(at + found.len()..).is_some_and(ends))
}

fn ancestry(pid: u32) -> Vec<u32> {
    std::iter::successors(Some(pid), |pid| status(*pid, "PPid:").filter(|parent| *parent > 0)).collect()
}

/// The first number of a field of `/proc/PID/status`.
fn status(pid: u32, field: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, process::Child};

    use super::*;

    struct Sleeper(Child);

    impl Sleeper {
        fn start(edit: impl FnOnce(&mut Command)) -> Self {
            let mut command = Command::new("sleep");
            edit(command.arg("60"));
            Self(command.spawn().unwrap())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        path.canonicalize().unwrap()
    }

    #[test]
    fn who_works_in_a_folder_or_has_a_file_of_it_open_is_found_and_nobody_else() {
        let (own, longer) = (folder("lab-1"), folder("lab-1-longer"));
        let log = std::fs::File::create(own.join("log")).unwrap();
        let works = Sleeper::start(|command| {
            let _ = command.current_dir(&own);
        });
        let writes = Sleeper::start(|command| {
            let _ = command.stderr(log.try_clone().unwrap());
        });
        let removed = std::fs::File::create(own.join("gone")).unwrap();
        std::fs::remove_file(own.join("gone")).unwrap();
        let keeps = Sleeper::start(|command| {
            let _ = command.stdout(removed);
        });
        let _other = Sleeper::start(|command| {
            let _ = command.current_dir(&longer);
        });
        let mut found = holders(&own);
        found.sort_unstable();
        let mut expected = [works.0.id(), writes.0.id(), keeps.0.id()];
        expected.sort_unstable();
        // This process has the log open, too.
        assert_eq!(found, expected);
        assert!(!is_guest(works.0.id()));
        drop((works, writes, keeps));
        assert!(holders(&own).is_empty());
        for folder in [own, longer] {
            std::fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn a_command_line_names_a_folder_by_its_whole_path() {
        let folder = Path::new("/t/lab/12-1");
        for (line, named) in [
            ("up\0--data-dir\0/t/lab/12-1/data\0", true),
            ("--root=/t/lab/12-1\0", true),
            ("file,path=/t/lab/12-1,append=on", true),
            ("/t/lab/12-10/data /t/lab/12-1/data", true),
            ("/t/lab/12-10/data", false),
            ("/t/lab/12-1.old", false),
            ("", false),
        ] {
            assert_eq!(names(line, folder), named, "{line}");
        }
    }
}
