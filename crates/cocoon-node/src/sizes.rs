//! A pod's resources as the sizes of its VM (`node-agent` §6.4). Pure.
//!
//! Entry points: [`sizes`] and [`bytes`]. Weight and quota are host-side and not built here.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::api::resource::Quantity};

use crate::{
    planner::observation::Sizes,
    reason::{Reason, Trouble},
};

/// What the engine takes at the least.
const LEAST_MEMORY: u64 = 128 << 20;

/// vCPU = CPU limit, else request, rounded up; memory = request, else limit; disk = `storage`.
/// What is not said comes from `defaults`.
pub fn sizes(pod: &Pod, storage: &str, defaults: Sizes) -> Result<Sizes, Trouble> {
    let resources = pod.spec.as_ref().and_then(|spec| spec.containers.first()?.resources.as_ref());
    let limits = resources.and_then(|r| r.limits.as_ref());
    let requests = resources.and_then(|r| r.requests.as_ref());
    let cpu = quantity(limits, "cpu")?.or(quantity(requests, "cpu")?);
    let memory = quantity(requests, "memory")?.or(quantity(limits, "memory")?);
    let memory = memory.map_or(defaults.memory, whole);
    if memory < LEAST_MEMORY {
        let message = format!("the pod gets {memory} bytes of memory, a VM needs at least {LEAST_MEMORY}");
        return Err(Trouble::new(Reason::InvalidResources, message));
    }
    let storage = if storage.is_empty() { defaults.storage } else { bytes(storage)? };
    Ok(Sizes { cpu: cpu.map_or(defaults.cpu, whole).max(1), memory, storage })
}

fn quantity(map: Option<&BTreeMap<String, Quantity>>, name: &str) -> Result<Option<u128>, Trouble> {
    map.and_then(|map| map.get(name)).map(|quantity| milli(&quantity.0)).transpose()
}

/// Thousandths, rounded up to a whole number.
fn whole(milli: u128) -> u64 {
    u64::try_from(milli.div_ceil(1000)).unwrap_or(u64::MAX)
}

/// A quantity as whole units, rounded up.
pub fn bytes(text: &str) -> Result<u64, Trouble> {
    milli(text).map(whole)
}

/// A quantity in thousandths, rounded up. Negative ones are refused: nothing here can be less than 0.
fn milli(text: &str) -> Result<u128, Trouble> {
    let wrong = || {
        let message = format!("{text:?} is not a resource quantity; write for example 500m, 2, 1Gi or 10G");
        Trouble::new(Reason::InvalidResources, message)
    };
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '+').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let number = number.strip_prefix('+').unwrap_or(number);
    let (integer, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{integer}{fraction}");
    if digits.is_empty() || digits.len() > 24 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let mantissa: u128 = digits.parse().map_err(|_| wrong())?;
    let (numerator, denominator) = scale(suffix).ok_or_else(wrong)?;
    let scaled = mantissa.checked_mul(numerator).ok_or_else(wrong)?;
    let below = u32::try_from(fraction.len()).ok().and_then(|n| 10_u128.checked_pow(n)).ok_or_else(wrong)?;
    Ok(scaled.div_ceil(below.checked_mul(denominator).ok_or_else(wrong)?))
}

/// Thousandths in one unit of the suffix, as a fraction.
fn scale(suffix: &str) -> Option<(u128, u128)> {
    let decimal = |power: u32| Some((1000 * 10_u128.pow(power), 1));
    let binary = |power: u32| Some((1000 << (10 * power), 1));
    match suffix {
        "n" => Some((1, 1_000_000)),
        "u" => Some((1, 1000)),
        "m" => Some((1, 1)),
        "" => decimal(0),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        other => exponent(other.strip_prefix(['e', 'E'])?),
    }
}

fn exponent(text: &str) -> Option<(u128, u128)> {
    let power: i32 = text.parse().ok()?;
    let size = 10_u128.checked_pow(power.unsigned_abs()).filter(|_| power.unsigned_abs() <= 18)?;
    Some(if power < 0 { (1000, size) } else { (1000 * size, 1) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DEFAULTS: Sizes = Sizes { cpu: 1, memory: 512 << 20, storage: 10 << 30 };

    fn pod(resources: &serde_json::Value) -> Pod {
        let spec = serde_json::json!({"containers": [{"name": "agent", "resources": resources}]});
        serde_json::from_value(serde_json::json!({"metadata": {}, "spec": spec})).unwrap()
    }

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, expected) in [
            ("1Gi", 1 << 30),
            ("10G", 10_000_000_000),
            ("1.5Ki", 1536),
            ("500m", 1),
            ("2", 2),
            ("1e3", 1000),
            ("1E", 1_000_000_000_000_000_000),
            ("1500u", 1),
            ("0", 0),
            ("+5", 5),
            (".5k", 500),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "Gi", "1X", "-1", "1 Gi", "1.2.3", "1e99", "９"] {
            assert_eq!(bytes(text).unwrap_err().reason, Reason::InvalidResources, "{text}");
        }
    }

    #[test]
    fn cpu_takes_the_limit_first_and_memory_the_request_first() {
        let resources = serde_json::json!({
            "limits": {"cpu": "2500m", "memory": "2Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}
        });
        let found = sizes(&pod(&resources), "20Gi", DEFAULTS).unwrap();
        assert_eq!(found, Sizes { cpu: 3, memory: 1 << 30, storage: 20 << 30 });
        assert_eq!(sizes(&pod(&serde_json::json!({})), "", DEFAULTS).unwrap(), DEFAULTS);
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC{0,30}") {
            let _ = bytes(&text);
        }

        #[test]
        fn whole_numbers_are_themselves(number in 0_u64..u64::MAX) {
            prop_assert_eq!(bytes(&number.to_string()), Ok(number));
        }
    }
}
