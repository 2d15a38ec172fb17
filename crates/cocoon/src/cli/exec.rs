//! `cocoon vm exec`: streams and exit code of a command in the guest.

use std::{collections::BTreeMap, io::IsTerminal as _, time::Duration};

use anyhow::{Context as _, bail};
use clap::Args;
use cocoon_engine::{engine::Engine, error::ChangeError};
use cocoon_guest::host::{Exec, ExecEvent, GuestError};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    sync::mpsc,
};

use super::Exit;

/// Epilogue of the help.
pub const HELP: &str = "Example:\n  cocoon vm exec demo -- uname -a\n  echo hello | cocoon vm exec -i demo -- cat\n\n\
    Exit status: the command's own; 255 when a signal ended it; 1 when it could not be run.";

/// How long the agent may take to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Bytes of stdin in one frame (`engine-cli` §8).
const CHUNK: usize = 32 << 10;

/// `vm exec`.
#[derive(Debug, Clone, Args)]
pub struct ExecArgs {
    /// Pass standard input on.
    #[arg(short, long)]
    pub interactive: bool,
    /// Environment variable KEY=VALUE; repeatable.
    #[arg(short, long = "env", value_name = "KEY=VALUE")]
    pub env: Vec<String>,
    /// Id, name, or unique start of an id.
    pub vm: String,
    /// Program and arguments, after `--`.
    #[arg(required = true, last = true, value_name = "ARGV")]
    pub argv: Vec<String>,
}

/// Runs the command; the exit code is the guest's.
pub async fn run(engine: &Engine, args: ExecArgs) -> anyhow::Result<Exit> {
    let exec = Exec { argv: args.argv, env: environment(&args.env)? };
    let channel = engine.guest(&args.vm, false, ANSWER).await.map_err(explained)?;
    let mut session =
        channel.exec(exec).await.with_context(|| format!("running a command in {}", args.vm))?;
    if args.interactive {
        if std::io::stdin().is_terminal() {
            super::output::note("note: there is no terminal in the guest; end your input with Ctrl-D");
        }
        tokio::spawn(feed(tokio::io::stdin(), session.stdin));
    } else {
        drop(session.stdin);
    }
    while let Some(event) = session.events.recv().await {
        match event.with_context(|| format!("running a command in {}", args.vm))? {
            ExecEvent::Started(_) | ExecEvent::Killed(_) => {}
            ExecEvent::Stdout(bytes) => write(std::io::stdout().lock(), &bytes)?,
            ExecEvent::Stderr(bytes) => write(std::io::stderr().lock(), &bytes)?,
            ExecEvent::Exit(code) => return Ok(Exit::from_guest(code)),
        }
    }
    bail!("the guest of {} ended the session without an exit code", args.vm)
}

fn write(mut to: impl std::io::Write, bytes: &[u8]) -> anyhow::Result<()> {
    to.write_all(bytes).and_then(|()| to.flush()).context("writing the command's output")
}

/// Ends when the input or the command does; dropping the sender closes the guest's stdin.
async fn feed(mut from: impl AsyncRead + Unpin, to: mpsc::Sender<Vec<u8>>) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(read) = from.read(&mut buffer).await {
        if read == 0 || to.send(buffer[..read].to_vec()).await.is_err() {
            break;
        }
    }
}

fn environment(pairs: &[String]) -> anyhow::Result<BTreeMap<String, String>> {
    let pair = |text: &String| match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => bail!("-e {text:?} is not KEY=VALUE"),
    };
    pairs.iter().map(pair).collect()
}

/// A guest that does not answer gets the phrase that callers retry on; nothing else does.
fn explained(error: ChangeError) -> anyhow::Error {
    let error = anyhow::Error::from(error);
    let silent = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(GuestError::Silent(_) | GuestError::Closed))
    };
    if error.chain().any(silent) {
        return error.context(
            "read CONNECT reply: EOF; the guest agent may still be starting, try again in some seconds",
        );
    }
    error
}

#[cfg(test)]
mod tests {
    use cocoon_engine::error::Fault;

    use super::*;

    #[test]
    fn environment_pairs_need_a_key_and_keep_every_later_equals_sign() {
        let pairs = environment(&["A=b=c".to_owned(), "B=".to_owned()]).unwrap();
        assert_eq!(
            pairs.into_iter().collect::<Vec<_>>(),
            [("A".into(), "b=c".into()), ("B".into(), String::new())]
        );
        for bad in ["A", "=b", ""] {
            assert!(environment(&[bad.to_owned()]).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_retry_phrase_is_for_silent_guests_alone() {
        let silent = Fault::new("guest port of x", GuestError::Silent(ANSWER));
        assert!(format!("{:#}", explained(silent.into())).contains("read CONNECT reply: EOF"));
        let other = Fault::new("guest port of x", std::io::Error::from(std::io::ErrorKind::PermissionDenied));
        for error in [other.into(), ChangeError::NotRunning("x".into())] {
            assert!(!format!("{:#}", explained(error)).contains("CONNECT"));
        }
    }

    #[tokio::test]
    async fn input_is_passed_on_in_chunks_and_closed_at_its_end() {
        let (send, mut receive) = mpsc::channel(8);
        let input = vec![7; CHUNK + 5];
        feed(&*input, send).await;
        let mut got = Vec::new();
        while let Some(chunk) = receive.recv().await {
            assert!(chunk.len() <= CHUNK);
            got.extend(chunk);
        }
        assert_eq!(got, input);
    }
}
