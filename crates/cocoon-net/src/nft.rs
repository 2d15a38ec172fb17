//! The one way to the packet filter: the `nft` program, fed on its standard input.
//!
//! Entry points: [`apply`] (one transaction: all or nothing), [`list`], [`list_json`] and [`list_made`]. `nft` works in
//! the network namespace of the calling thread. Invariant: a call ends within [`LIMIT`].

use std::{process::Stdio, time::Duration};

use serde_json::Value;
use thiserror::Error;
use tokio::{io::AsyncWriteExt as _, process::Command};

const LIMIT: Duration = Duration::from_secs(20);

/// Why `nft` did not do what was asked.
#[derive(Debug, Error)]
pub(crate) enum NftError {
    /// A table, chain, set or row that was named is not there.
    #[error("{0}")]
    NotThere(String),
    /// Something else; what `nft` said, or why it said nothing.
    #[error("{0}")]
    Refused(String),
}

/// Runs `text` as one transaction.
pub(crate) async fn apply(text: &str) -> Result<(), NftError> {
    run("nft", &["-f", "-"], text).await.map(drop)
}

/// Runs one listing command, without counters and without the content of sets.
pub(crate) async fn list(command: &str) -> Result<String, NftError> {
    run("nft", &["-s", "-t", command], "").await
}

/// What [`list`] says of two tables that `text` makes, where nobody can change them in between: in a network namespace
/// that lives as long as this call.
pub(crate) async fn list_made(text: &str, [first, second]: &[String; 2]) -> Result<String, NftError> {
    const SCRIPT: &str = r#"nft -f - && nft -s -t "$0" && nft -s -t "$1""#;
    run("unshare", &["--net", "sh", "-c", SCRIPT, first, second], text).await
}

/// Runs one listing command, with handles. (Given on standard input together with `-j`, nft 1.0.6 prints
/// nothing and succeeds.)
pub(crate) async fn list_json(command: &str) -> Result<Vec<Value>, NftError> {
    let text = run("nft", &["-j", "-a", command], "").await?;
    let answer = serde_json::from_str::<Value>(&text);
    match answer.map(|mut answer| answer.get_mut("nftables").map(Value::take)) {
        Ok(Some(Value::Array(objects))) => Ok(objects),
        _ => Err(NftError::Refused(format!("nft answered {command:?} with something that is not its JSON"))),
    }
}

async fn run(program: &str, arguments: &[&str], text: &str) -> Result<String, NftError> {
    let late = || NftError::Refused(format!("nft did not answer within {} s", LIMIT.as_secs()));
    tokio::time::timeout(LIMIT, feed(program, arguments, text)).await.unwrap_or_else(|_| Err(late()))
}

async fn feed(program: &str, arguments: &[&str], text: &str) -> Result<String, NftError> {
    let mut child = Command::new(program)
        .args(arguments)
        // What it says is read below.
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| {
            NftError::Refused(format!(
                "cannot start {program} ({error}); install it with `apt-get install nftables util-linux`"
            ))
        })?;
    if let Some(mut stdin) = child.stdin.take() {
        // A child that refuses early closes its end; what it has to say is on its stderr.
        let _ = stdin.write_all(text.as_bytes()).await;
    }
    let output = child
        .wait_with_output()
        .await
        .map_err(|error| NftError::Refused(format!("waiting for nft: {error}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let message = said.lines().take(3).collect::<Vec<_>>().join("; ");
    let missing = message.contains("No such file or directory");
    Err(if missing { NftError::NotThere(message) } else { NftError::Refused(message) })
}
