//! The guest channel (cocoon-guest): frames, the agent's side of a session, the client's side.
//!
//! Sessions run real programs of this machine, with the variable [`INHERITED`] in the environment.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cocoon_guest::agent::session::{Machine, serve};
use cocoon_guest::host::{Entropy, Exec, ExecEvent, ask, start};
use cocoon_guest::protocol::{self, Frame, FrameReader, Identity, Kind};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::checkers::{Answer, unknown_function};
use super::folder::Vector;

/// A variable that the agent of the vectors had in its environment.
pub const INHERITED: (&str, &str) = ("GZ_INHERITED", "yes");
/// Room for everything a vector sends at once.
const BUFFER: usize = 1 << 20;
/// The longest vector sleeps for 0.4 s.
const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn answer(vector: &Vector) -> Result<Answer> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ours = match vector.function.as_str() {
        "encode" => encode(vector)?,
        "decode" => runtime.block_on(decode(vector.text("text"))),
        "session" => runtime.block_on(session(vector))?,
        "client_run" => runtime.block_on(client_run(vector))?,
        "client_reseed" => runtime.block_on(client_reseed(vector)),
        _ => return unknown_function(vector),
    };
    Ok(Answer::Is(ours))
}

fn encode(vector: &Vector) -> Result<Value> {
    let number = |name: &str| vector.input[name].as_i64().unwrap_or_default();
    let frame = Frame {
        kind: Kind::from(vector.text("type")),
        argv: vector.parse::<Option<Vec<String>>>("argv")?.unwrap_or_default(),
        env: vector.parse::<Option<BTreeMap<String, String>>>("env")?.unwrap_or_default(),
        data: STANDARD.decode(vector.text("data_b64"))?,
        pid: number("pid"),
        exit_code: number("exit_code"),
        message: vector.text("message").to_owned(),
        regen_machine_id: vector.flag("regen_machine_id"),
        ..Frame::default()
    };
    Ok(String::from_utf8(protocol::encode(&frame)?)?.into())
}

async fn decode(text: &str) -> Value {
    let mut frames = FrameReader::new(text.as_bytes());
    let mut read = Vec::new();
    while let Ok(Some(frame)) = frames.next().await {
        read.push(json!({
            "type": frame.kind.as_str(),
            "data_b64": STANDARD.encode(&frame.data),
            "exit_code": frame.exit_code,
            "error": null,
        }));
    }
    read.push(json!({ "type": "", "data_b64": "", "exit_code": 0, "error": true }));
    read.into()
}

/// A machine on which nothing may be changed.
struct NoMachine;

#[async_trait::async_trait]
impl Machine for NoMachine {
    async fn reseed(&self, _: &[u8], _: bool) -> Result<(), String> {
        Err("not here".to_owned())
    }

    async fn identity(&self, _: &Identity) -> Result<(), String> {
        Err("not here".to_owned())
    }
}

async fn session(vector: &Vector) -> Result<Value> {
    let (mut client, agent) = duplex(BUFFER);
    let server = tokio::spawn(async move { serve(agent, &NoMachine, std::future::pending()).await });
    client.write_all(vector.text("send").as_bytes()).await?;
    if vector.flag("close_write_after_send") {
        client.shutdown().await?;
    }
    let mut said = String::new();
    let timed_out = tokio::time::timeout(LIMIT, client.read_to_string(&mut said)).await.is_err();
    server.abort();
    let mut frames: Vec<Value> = Vec::new();
    for line in said.lines() {
        let frame = serde_json::from_str(line).with_context(|| format!("{line:?} is no frame"))?;
        push(&mut frames, frame)?;
    }
    Ok(json!({ "frames": frames, "timed_out": timed_out }))
}

/// Adds a frame in the form of the vectors: output joined with output of the same kind before it, a
/// process id as 1, a message as `true`.
fn push(frames: &mut Vec<Value>, mut frame: Value) -> Result<()> {
    if frame["pid"].as_i64().is_some_and(|pid| pid > 0) {
        frame["pid"] = 1.into();
    }
    if frame["message"].as_str().is_some_and(|message| !message.is_empty()) {
        frame["message"] = true.into();
    }
    if let Some(last) = frames.last_mut()
        && last["type"] == frame["type"]
        && let (Some(before), Some(more)) = (last["data"].as_str(), frame["data"].as_str())
    {
        let joined = [STANDARD.decode(before)?, STANDARD.decode(more)?].concat();
        last["data"] = STANDARD.encode(joined).into();
        return Ok(());
    }
    frames.push(frame);
    Ok(())
}

/// The agent's end for a client: everything it says stands ready, and what the client sent comes back.
async fn agent_that_says(mut agent: DuplexStream, reply: String) -> String {
    let mut sent = String::new();
    let said = agent.write_all(reply.as_bytes()).await.is_ok() && agent.shutdown().await.is_ok();
    if said {
        drop(agent.read_to_string(&mut sent).await);
    }
    sent
}

async fn client_run(vector: &Vector) -> Result<Value> {
    let (client, agent) = duplex(BUFFER);
    let agent = tokio::spawn(agent_that_says(agent, vector.text("reply").to_owned()));
    let mut session = start(client, Exec { argv: vector.parse("argv")?, env: vector.parse("env")? });
    drop(session.stdin);
    let (mut stdout, mut stderr, mut code, mut failed) = (Vec::new(), Vec::new(), 0, false);
    while let Some(event) = session.events.recv().await {
        match event {
            Ok(ExecEvent::Started(_) | ExecEvent::Killed(_)) => {}
            Ok(ExecEvent::Stdout(bytes)) => stdout.extend(bytes),
            Ok(ExecEvent::Stderr(bytes)) => stderr.extend(bytes),
            Ok(ExecEvent::Exit(with)) => code = with,
            Err(_) => failed = true,
        }
    }
    let phrases: Vec<String> =
        if stderr.is_empty() { vec![] } else { vec![String::from_utf8_lossy(&stderr).into_owned()] };
    Ok(json!({
        "error": failed.then_some(true),
        "exit_code": code,
        "sent": agent.await?,
        "stdout": String::from_utf8_lossy(&stdout),
        "stderr_phrases": phrases,
    }))
}

async fn client_reseed(vector: &Vector) -> Value {
    let (client, agent) = duplex(BUFFER);
    let agent = tokio::spawn(agent_that_says(agent, vector.text("reply").to_owned()));
    let entropy = Entropy {
        bytes: vector.text("entropy").as_bytes().to_vec(),
        regen_machine_id: vector.flag("regen_machine_id"),
    };
    let failed = ask(client, &entropy.frame()).await.is_err();
    json!({ "error": failed.then_some(true), "sent": agent.await.unwrap_or_default() })
}
