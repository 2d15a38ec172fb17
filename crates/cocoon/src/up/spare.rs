//! Space set aside in the data folder, so that `cocoon up` starts on a disk that is full: without it nobody could
//! delete the pod that filled it.
//!
//! Entry points: [`give`] before anything is written, [`keep`] for as long as `cocoon up` runs. Invariant: the file
//! is only ever made where much more than it is free.

use std::{fs::File, io, os::unix::fs::MetadataExt as _, path::Path, time::Duration};

use cocoon_kit::files;
use rustix::fs::statvfs;
use tokio_util::sync::CancellationToken;

const NAME: &str = "spare";
/// What a start writes at most: the logs of three databases, with what they set aside for themselves (32 MiB),
/// certificates, kubeconfig and the network's files.
const SIZE: u64 = 36 << 20;
/// It is made again only where so much is free.
const PLENTY: u64 = 4 * SIZE;
const LOOK: Duration = Duration::from_secs(10);

/// What is to be done about the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Nothing,
    Make,
    Give,
}

/// `held` and `free` are bytes on the disk; only a start gives.
const fn step(held: u64, free: u64, starting: bool) -> Step {
    if starting && free < SIZE && held > 0 {
        Step::Give
    } else if held < SIZE && free >= PLENTY {
        Step::Make
    } else {
        Step::Nothing
    }
}

/// Gives the space back if the disk has none left for a start.
pub(super) fn give(folder: &Path) -> io::Result<()> {
    if look(folder, true)? == Step::Give {
        std::fs::remove_file(folder.join(NAME))?;
        tracing::warn!(folder = %folder.display(), "the disk is full; the space that was set aside is used to start");
    }
    Ok(())
}

/// The error of a start on a disk that is full says so, whatever failed first.
pub(super) fn explained(folder: &Path, error: anyhow::Error) -> anyhow::Error {
    if is_full(folder) {
        let folder = folder.display();
        return error.context(format!(
            "the disk of data folder {folder} is full; free some MiB on it, then start again"
        ));
    }
    error
}

/// Whether nothing more can be written there.
pub(super) fn is_full(folder: &Path) -> bool {
    free(folder).is_ok_and(|free| free < 1 << 20)
}

/// Sets the space aside, and again once there is room; best effort.
pub(super) async fn keep(folder: &Path, ended: CancellationToken) {
    loop {
        if let Err(error) = make(folder) {
            tracing::debug!(folder = %folder.display(), %error, "no space is set aside for a start");
        }
        tokio::select! {
            () = ended.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

fn make(folder: &Path) -> io::Result<()> {
    if look(folder, false)? == Step::Make {
        let path = folder.join(NAME);
        File::options().create(true).append(true).open(&path)?;
        files::reserve(&path, SIZE)?;
    }
    Ok(())
}

fn look(folder: &Path, starting: bool) -> io::Result<Step> {
    let held = match std::fs::metadata(folder.join(NAME)) {
        Ok(facts) => facts.blocks() * 512,
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => return Err(error),
    };
    Ok(step(held, free(folder)?, starting))
}

fn free(folder: &Path) -> io::Result<u64> {
    let disk = statvfs(folder)?;
    Ok(disk.f_bavail * disk.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_given_only_to_a_start_on_a_full_disk_and_made_only_where_much_is_free() {
        for (held, free, starting, wanted) in [
            (0, PLENTY, false, Step::Make),
            (SIZE - 1, PLENTY, true, Step::Make),
            (0, PLENTY - 1, false, Step::Nothing),
            (SIZE, u64::MAX, false, Step::Nothing),
            (SIZE, 0, false, Step::Nothing),
            (SIZE, SIZE, true, Step::Nothing),
            (SIZE, SIZE - 1, true, Step::Give),
            (1, 0, true, Step::Give),
            (0, 0, true, Step::Nothing),
        ] {
            assert_eq!(step(held, free, starting), wanted, "{held} held, {free} free, starting: {starting}");
        }
    }

    #[test]
    fn made_it_takes_its_space_and_nothing_more_and_a_folder_with_room_gives_nothing() {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            make(folder.path()).unwrap();
            let held = std::fs::metadata(folder.path().join(NAME)).unwrap();
            assert!((SIZE..SIZE + (1 << 20)).contains(&(held.blocks() * 512)), "{}", held.blocks());
            give(folder.path()).unwrap();
        }
    }
}
