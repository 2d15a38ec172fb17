//! The two parts inside the binary: guest agent and shim (`build.rs`).

/// What to type when a part is not inside.
pub const REMEDY: &str = "build them with `cargo xtask embed`, then build this program again";

static GUEST_AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/cocoon-guest-agent"));
static SHIM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libcocoon_shim.so"));

/// The static guest agent, if it was embedded.
#[must_use]
pub fn guest_agent() -> Option<&'static [u8]> {
    Some(GUEST_AGENT).filter(|bytes| !bytes.is_empty())
}

/// The library preloaded into a clone's QEMU, if it was embedded.
#[must_use]
pub fn shim() -> Option<&'static [u8]> {
    Some(SHIM).filter(|bytes| !bytes.is_empty())
}
