//! DHCP, leases and subnets (cocoon-net).

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result};
use cocoon_net::config::{first_host, subnet_ips};
use cocoon_net::dhcp::{Effect, Outcome, Server, Settings};
use cocoon_net::leases;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::checkers::{Answer, unknown_function};
use super::folder::Vector;

pub(crate) fn answer(vector: &Vector) -> Result<Answer> {
    let ours = match vector.function.as_str() {
        "dhcp_sequence" => dhcp_sequence(vector)?,
        "lease_load" => lease_load(vector.text("text"))?,
        "subnet_ips" => subnet(vector),
        _ => return unknown_function(vector),
    };
    Ok(Answer::Is(ours))
}

fn now() -> Result<Timestamp> {
    "2026-01-02T03:04:05Z".parse().context("a fixed time")
}

/// The packets stand in the vector's answer; each is given to one server in turn.
fn dhcp_sequence(vector: &Vector) -> Result<Value> {
    let settings = Settings {
        gateway: vector.parse("gateway")?,
        mask: vector.parse("mask")?,
        dns: vector.parse("dns")?,
        lease_time: Duration::from_secs(vector.parse("lease_seconds")?),
    };
    let pool: Vec<Ipv4Addr> = vector.parse("pool")?;
    let mut server = Server::new(settings, pool, []);
    let mut file = String::new();
    let steps = vector.output.as_array().context("the answer is no list of steps")?;
    steps.iter().map(|given| step(&mut server, &mut file, given)).collect::<Result<_>>().map(Value::Array)
}

fn step(server: &mut Server, file: &mut String, given: &Value) -> Result<Value> {
    let now = now()?;
    let packet = hex::decode(given["packet_hex"].as_str().unwrap_or_default())?;
    let before = server.checkpoint();
    let outcome = server.handle(&packet, now);
    let grants = outcome.effects.iter().any(|effect| matches!(effect, Effect::Grant { .. }));
    let reply = if grants && given["route_add_fails"] == true {
        server.restore(before, 1);
        outcome.refusal.as_ref()
    } else {
        if !outcome.effects.is_empty() {
            *file = file_text(server)?;
        }
        outcome.reply.as_ref()
    };
    let mut ours = given.clone();
    ours["active_leases"] = server.active(now).into();
    ours["free"] = server.free(now).into();
    ours["lease_file"] = file.as_str().into();
    ours["routes"] = routes(&outcome).into();
    ours["replies"] = reply.map(|reply| described(&reply.bytes)).into_iter().collect();
    Ok(ours)
}

fn routes(outcome: &Outcome) -> Vec<String> {
    let route = |effect: &Effect| match effect {
        Effect::Grant { ip, .. } => format!("add {ip}"),
        Effect::Revoke { ip, .. } => format!("del {ip}"),
    };
    outcome.effects.iter().map(route).collect()
}

/// The lease file with its times hidden, as in the vectors.
fn file_text(server: &Server) -> Result<String> {
    let text = leases::render(&server.leases());
    let rows: Vec<Value> = serde_json::from_str(&text)?;
    let expiries = rows.iter().filter_map(|row| row["expiry"].as_str());
    Ok(expiries.fold(text.clone(), |text, expiry| text.replace(expiry, "<expiry>")))
}

/// A reply, read byte by byte so that nothing of the server's own code judges it.
fn described(bytes: &[u8]) -> Value {
    const OPTIONS: usize = 240;
    let address = |at: usize| {
        let part: [u8; 4] = bytes.get(at..at + 4).and_then(|part| part.try_into().ok()).unwrap_or_default();
        Ipv4Addr::from(part).to_string()
    };
    let (mut kind, mut seconds, mut at) = ("none", 0u32, OPTIONS);
    while let (Some(&code), Some(&length)) = (bytes.get(at), bytes.get(at + 1)) {
        if code == 255 {
            break;
        }
        let value = bytes.get(at + 2..at + 2 + usize::from(length)).unwrap_or_default();
        match (code, value) {
            (53, [2]) => kind = "OFFER",
            (53, [5]) => kind = "ACK",
            (53, [6]) => kind = "NAK",
            (51, [a, b, c, d]) => seconds = u32::from_be_bytes([*a, *b, *c, *d]),
            _ => {}
        }
        at += 2 + usize::from(length);
    }
    json!({
        "hex": hex::encode(bytes),
        "type": kind,
        "lease_seconds": seconds,
        "yiaddr": address(16),
        "siaddr": address(20),
    })
}

fn lease_load(text: &str) -> Result<Value> {
    let parsed = leases::parse(text);
    let ok = parsed.is_ok();
    let live = parsed.unwrap_or_default().live(now()?);
    let rows: Map<String, Value> =
        live.into_iter().map(|(mac, lease)| (mac, lease.ip.to_string().into())).collect();
    let empty = rows.is_empty().then(|| leases::render([]));
    Ok(json!({ "ok": ok, "leases": rows, "empty_saves_as": empty }))
}

fn subnet(vector: &Vector) -> Value {
    let cidr = vector.text("cidr");
    let count = vector.input["count"].as_i64().unwrap_or_default();
    let ips = subnet_ips(cidr, vector.text("gateway"), count);
    let first = first_host(cidr);
    json!({
        "error": ips.is_err().then_some(true),
        "ips": ips.ok(),
        "first_host_error": first.is_err().then_some(true),
        "first_host": first.map(|first| first.to_string()).unwrap_or_default(),
    })
}
