//! Sizes as people type them (`engine-cli` §0). Pure.
//!
//! Units are binary whatever their spelling: `512M`, `1G`, `1GiB`, `1.5g`, plain bytes. A Kubernetes
//! quantity such as `20Gi` is refused, as the original does, so that nobody relies on it.

/// Parses a size into bytes.
pub fn parse(text: &str) -> Result<u64, String> {
    read(text).ok_or_else(|| {
        format!("{text:?} is not a size; write bytes, or a number with K, M, G or T, such as 512M")
    })
}

fn read(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = u128::from(multiplier(unit.strip_prefix(' ').unwrap_or(unit))?);
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || part.is_empty() || part.len() > 9 || part.contains('.') {
        return None;
    }
    let scale = 10_u128.pow(u32::try_from(part.len()).ok()?);
    let part = part.parse::<u128>().ok()? * unit / scale;
    u64::try_from(whole.parse::<u128>().ok()?.checked_mul(unit)?.checked_add(part)?).ok()
}

fn multiplier(unit: &str) -> Option<u64> {
    let power = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 1,
        "m" | "mb" | "mib" => 2,
        "g" | "gb" | "gib" => 3,
        "t" | "tb" | "tib" => 4,
        "p" | "pb" | "pib" => 5,
        _ => return None,
    };
    Some(1 << (10 * power))
}

/// Bytes for people: the largest unit that leaves at least 1, one decimal where it is needed.
#[must_use]
pub fn show(bytes: u64) -> String {
    let power = (0..=5_u32).rev().find(|power| bytes >= 1 << (10 * power)).unwrap_or(0);
    if power == 0 {
        return format!("{bytes}B");
    }
    let unit = 1_u64 << (10 * power);
    let name = [' ', 'K', 'M', 'G', 'T', 'P'][power as usize];
    // One decimal, rounded down: a size is never shown larger than it is.
    let tenths = u128::from(bytes) * 10 / u128::from(unit);
    match tenths % 10 {
        0 => format!("{}{name}", tenths / 10),
        part => format!("{}.{part}{name}", tenths / 10),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_are_binary_and_kubernetes_quantities_are_refused() {
        for (text, bytes) in [
            ("0", Some(0)),
            ("1073741824", Some(1 << 30)),
            ("512M", Some(512 << 20)),
            ("1G", Some(1 << 30)),
            ("1GiB", Some(1 << 30)),
            ("1gb", Some(1 << 30)),
            ("1.5G", Some(3 << 29)),
            ("10 GiB", Some(10 << 30)),
            ("2T", Some(2 << 40)),
            ("7b", Some(7)),
            ("20Gi", None),
            ("500m5", None),
            ("", None),
            ("G", None),
            (".5G", None),
            ("1.", None),
            ("1.2.3", None),
            ("-1", None),
            ("+1", None),
            ("abc", None),
            ("1e9", None),
            ("99999999999P", None),
            ("１", None),
        ] {
            assert_eq!(parse(text).ok(), bytes, "{text:?}");
        }
    }

    #[test]
    fn sizes_are_shown_short_and_never_too_large() {
        for (bytes, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1K"),
            (1536, "1.5K"),
            (10 << 30, "10G"),
            (u64::MAX, "16383.9P"),
        ] {
            assert_eq!(show(bytes), text);
        }
    }

    proptest! {
        #[test]
        fn plain_bytes_are_themselves(bytes in any::<u64>()) {
            prop_assert_eq!(parse(&bytes.to_string()), Ok(bytes));
        }

        #[test]
        fn any_text_ends_in_a_result(text in ".{0,24}") {
            let _ = parse(&text);
        }

        #[test]
        fn what_is_shown_is_read_back_as_at_most_the_same(bytes in any::<u64>()) {
            let read = parse(&show(bytes)).unwrap();
            prop_assert!(read <= bytes && bytes - read <= bytes / 10, "{} {}", bytes, read);
        }
    }
}
