//! `cocoon vm logs`: the guest's console, as text (`cocoon_node::kubelet::console`).

use std::{
    fs::File,
    io::{Read as _, Seek as _, SeekFrom, Write as _},
};

use anyhow::Context as _;
use clap::Args;
use cocoon_engine::engine::Engine;
use cocoon_node::kubelet::console::Plain;

/// Epilogue of the help.
pub const HELP: &str = "Example:\n  cocoon vm logs --tail 50 demo\n\n\
    Exit status: 0 printed, also when the guest said nothing; 1 unknown: \"VM not found\".";

/// The engine keeps consoles below 4 MiB; a bit more is read, never without end.
const MOST: u64 = 8 << 20;

/// `vm logs`.
#[derive(Debug, Clone, Args)]
pub struct LogsArgs {
    /// Only the last lines; all by default.
    #[arg(long, value_name = "LINES")]
    pub tail: Option<usize>,
    /// All bytes as the guest wrote them, with colours and cursor movements.
    #[arg(long)]
    pub raw: bool,
    /// Id, name, or unique start of an id.
    pub vm: String,
}

/// Prints the console.
pub async fn run(engine: &Engine, args: &LogsArgs) -> anyhow::Result<()> {
    let path = engine.console(&args.vm).await?;
    let said = || format!("the console of {} in {}", args.vm, path.display());
    let mut file = match File::open(&path) {
        Ok(file) => file,
        // A VM that never ran has said nothing.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(said),
    };
    let length = file.metadata().with_context(said)?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MOST))).with_context(said)?;
    let mut text = Vec::new();
    file.take(MOST).read_to_end(&mut text).with_context(said)?;
    if !args.raw {
        text = Plain::default().pass(&text);
    }
    let shown = args.tail.map_or(text.as_slice(), |lines| last_lines(&text, lines));
    let mut out = std::io::stdout().lock();
    match out.write_all(shown).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// The end of a text, beginning after the line break before its last `lines` lines.
fn last_lines(text: &[u8], lines: usize) -> &[u8] {
    if lines == 0 {
        return &[];
    }
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let start = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').nth(lines - 1);
    start.map_or(text, |(at, _)| &text[at + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_counts_whole_lines_and_the_unfinished_last_one() {
        for (text, lines, shown) in [
            ("a\nb\nc\n", 2, "b\nc\n"),
            ("a\nb\nc", 2, "b\nc"),
            ("a\nb\nc\n", 9, "a\nb\nc\n"),
            ("a\n\n", 1, "\n"),
            ("a\nb\n", 0, ""),
            ("", 3, ""),
        ] {
            assert_eq!(last_lines(text.as_bytes(), lines), shown.as_bytes(), "{text:?} {lines}");
        }
    }
}
