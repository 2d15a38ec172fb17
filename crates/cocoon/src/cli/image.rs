//! `cocoon image`: import, list, inspect, rm (`engine-cli` §1.6, §5).

use std::{
    fs::File,
    io::{self, IsTerminal as _, Read, Write as _},
    os::fd::AsRawFd as _,
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use cocoon_engine::{
    engine::{Engine, MemoryRecipe},
    error::LookupError,
    image::{ImportOptions, Setuid},
    model::Image,
};

use super::{
    Exit,
    output::{self, note, print},
    owned::Owners,
    settings::Settings,
};

/// Most bytes of an archive on standard input.
const MOST: u64 = 64 << 30;

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Take an image from archive files or standard input. The same name is replaced.
    #[command(after_help = IMPORT_HELP)]
    Import(ImportArgs),
    /// List images.
    #[command(visible_alias = "ls", after_help = LIST_HELP)]
    List {
        /// `table` or `json`.
        #[arg(short = 'o', long, visible_alias = "output", default_value = "table")]
        format: String,
    },
    /// Print one image as JSON.
    #[command(
        after_help = "Example:\n  cocoon image inspect cocoon-demo:1\n\nExit status: 0 printed, 1 unknown: \"not found in any backend\"."
    )]
    Inspect {
        /// Name, or `sha256:` and at least three digits.
        image: String,
    },
    /// Forget images; `cocoon gc` frees their disks. One unknown name removes none.
    #[command(
        after_help = "Example:\n  cocoon image rm cocoon-demo:1\n\nExit status: 0 removed, 1 nothing was removed."
    )]
    Rm {
        /// Also images that a pod of `cocoon up` boots from.
        #[arg(long)]
        force: bool,
        /// Names or digests.
        #[arg(required = true)]
        images: Vec<String>,
    },
}

const LIST_HELP: &str = "Example:\n  cocoon image list -o json\n\n\
    Exit status: 0 printed, also when there is none; 1 failed, such as for an unknown format.";
const IMPORT_HELP: &str = "Examples:\n  skopeo copy docker://debian:12 oci-archive:debian.tar\n  \
    cocoon image import --strip-setuid debian:12 debian.tar\n  \
    docker save alpine | cocoon image import alpine:3\n  \
    cocoon image import rootfs:1 base.tar app.tar\n\n\
    One OCI or docker archive (plain, gzip or zstd), or tar files as layers, the lowest first. Refused:\n\
    paths and links out of the image, device nodes, setuid programs, archives that unpack to more than 32 GiB.\n\n\
    Exit status: 0 imported, 1 refused or failed (an older image of that name is kept).";

/// `image import`.
#[derive(Debug, Clone, Args)]
pub struct ImportArgs {
    /// Take setuid, setgid and capable programs without these rights, instead of refusing the image.
    #[arg(long)]
    strip_setuid: bool,
    /// Name for the image, such as debian:12.
    name: String,
    /// Archive files; standard input without any.
    files: Vec<PathBuf>,
}

/// Runs a verb.
pub async fn run(command: ImageCommand, settings: &Settings) -> anyhow::Result<Exit> {
    if let ImageCommand::Import(args) = command {
        import(&settings.engine(MemoryRecipe::Auto).await?, args, settings).await?;
        return Ok(Exit::SUCCESS);
    }
    let Some(engine) = settings.existing(MemoryRecipe::Auto).await? else { return nothing(&command) };
    match command {
        ImageCommand::Import(_) => {}
        ImageCommand::List { format } => print(&output::images(&engine.images().await?, &format)?)?,
        ImageCommand::Inspect { image } => print(&output::json(&engine.image(&image).await?)?)?,
        ImageCommand::Rm { images, force } => remove(&engine, &images, force, settings).await?,
    }
    Ok(Exit::SUCCESS)
}

/// The answer where there is no data folder.
fn nothing(command: &ImageCommand) -> anyhow::Result<Exit> {
    match command {
        ImageCommand::Import(_) => {}
        ImageCommand::List { format } => print(&output::images(&[], format)?)?,
        ImageCommand::Inspect { image } => return Err(LookupError::ImageNotFound(image.clone()).into()),
        ImageCommand::Rm { images, .. } => {
            return Err(LookupError::ImageNotFound(images.first().cloned().unwrap_or_default()).into());
        }
    }
    Ok(Exit::SUCCESS)
}

async fn import(engine: &Engine, args: ImportArgs, settings: &Settings) -> anyhow::Result<()> {
    let setuid = if args.strip_setuid { Setuid::Strip } else { Setuid::Refuse };
    let how = ImportOptions { setuid, ..ImportOptions::default() };
    // Kept open until the import is over: it has no name, so nothing is left of it whatever happens.
    let mut spooled = None;
    let files = if args.files.is_empty() {
        let file = tokio::task::spawn_blocking({
            let folder = settings.temp_dir();
            move || spool(io::stdin().lock(), &folder)
        });
        vec![path_of(spooled.insert(file.await??))]
    } else {
        args.files
    };
    let image = engine.image_import_with(&args.name, &files, how).await?;
    note(format_args!("imported {} ({}, {})", image.name, image.id, super::size::show(image.size)));
    Ok(())
}

/// A path by which an open file can be opened again.
fn path_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Archives are read more than once, so standard input goes to a file first.
fn spool(input: impl Read, folder: &std::path::Path) -> anyhow::Result<File> {
    if io::stdin().is_terminal() {
        bail!("no archive was given; name a tar file, or pipe one in");
    }
    let step = || format!("keeping standard input in {}", folder.display());
    let mut file = tempfile::tempfile_in(folder).with_context(step)?;
    let read = io::copy(&mut input.take(MOST + 1), &mut file).with_context(step)?;
    if read == 0 {
        bail!("standard input is empty; pipe a tar in, or name a file");
    }
    if read > MOST {
        bail!("standard input has more than {}", super::size::show(MOST));
    }
    file.flush().with_context(step)?;
    Ok(file)
}

async fn remove(engine: &Engine, images: &[String], force: bool, settings: &Settings) -> anyhow::Result<()> {
    let mut found: Vec<Image> = Vec::new();
    for wanted in images {
        found.push(engine.image(wanted).await?);
    }
    let owners = Owners::of(settings).await;
    owners.allow(found.iter().map(|image| owners.image(image)), force)?;
    for wanted in images {
        engine.image_remove(wanted).await?;
        note(format_args!("removed {wanted}"));
    }
    Ok(())
}
