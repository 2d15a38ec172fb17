//! Quantities: `500m`, `1.5Gi`, `2e3`.
//!
//! Entry points: [`milli`] and [`spell_out`]. Values are whole thousandths, rounded up, which is exact
//! enough for a scheduler.

use serde_json::Value;

use crate::error::Causes;

/// Larger amounts count as this much, so that sums of many never overflow.
const LARGEST: i128 = 10_i128.pow(30);

/// The value in thousandths, rounded up; `None` for a text that is no quantity.
pub(crate) fn milli(text: &str) -> Option<i128> {
    let end =
        text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '+' || c == '-')).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (numerator, denominator) = decimal(number)?;
    let (factor, divisor) = scale(suffix)?;
    let top = numerator.checked_mul(factor)?.checked_mul(1000)?;
    let bottom = denominator.checked_mul(divisor)?;
    let amount = top.div_euclid(bottom) + i128::from(top.rem_euclid(bottom) != 0);
    Some(amount.clamp(-LARGEST, LARGEST))
}

/// A decimal number as a fraction.
fn decimal(text: &str) -> Option<(i128, i128)> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let both = format!("{whole}{fraction}");
    // 18 digits leave room for the largest suffix.
    if both.is_empty() || both.len() > 18 || !both.bytes().all(|c| c.is_ascii_digit()) {
        return None;
    }
    let denominator = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    Some((sign * both.parse::<i128>().ok()?, denominator))
}

fn scale(suffix: &str) -> Option<(i128, i128)> {
    let power = |base: i128, exponent: u32| Some((base.checked_pow(exponent)?, 1));
    match suffix {
        "" => Some((1, 1)),
        "n" => Some((1, 1_000_000_000)),
        "u" => Some((1, 1_000_000)),
        "m" => Some((1, 1_000)),
        "k" => power(1000, 1),
        "M" => power(1000, 2),
        "G" => power(1000, 3),
        "T" => power(1000, 4),
        "P" => power(1000, 5),
        "E" => power(1000, 6),
        "Ki" => power(1024, 1),
        "Mi" => power(1024, 2),
        "Gi" => power(1024, 3),
        "Ti" => power(1024, 4),
        "Pi" => power(1024, 5),
        "Ei" => power(1024, 6),
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            let size = 10_i128.checked_pow(exponent.unsigned_abs().min(19))?;
            if exponent.unsigned_abs() > 18 {
                None
            } else if exponent < 0 {
                Some((1, size))
            } else {
                Some((size, 1))
            }
        }
    }
}

/// Turns plain numbers of a quantity map into texts, as the API does.
pub(crate) fn spell_out(map: &mut Value) {
    for value in map.as_object_mut().into_iter().flat_map(serde_json::Map::values_mut) {
        if value.is_number() {
            *value = Value::String(value.to_string());
        }
    }
}

/// Turns one field's plain number into a text.
pub(crate) fn spell_out_field(object: &mut Value, field: &str) {
    if let Some(value) = object.get_mut(field).filter(|value| value.is_number()) {
        *value = Value::String(value.to_string());
    }
}

/// Refuses texts that are no quantity, and negative ones.
pub(crate) fn validate_map(map: Option<&Value>, path: &str, causes: &mut Causes) {
    for (name, value) in map.and_then(Value::as_object).into_iter().flatten() {
        match value.as_str().and_then(milli) {
            Some(amount) if amount >= 0 => {}
            Some(_) => causes.invalid(format!("{path}[{name}]"), value, "must be greater than or equal to 0"),
            None => causes.invalid(
                format!("{path}[{name}]"),
                value,
                "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_read_in_thousandths() {
        for (text, wanted) in [
            ("1", Some(1000)),
            ("500m", Some(500)),
            ("0.1", Some(100)),
            (".5", Some(500)),
            ("1Ki", Some(1_024_000)),
            ("1.5Gi", Some(1_610_612_736_000)),
            ("2e3", Some(2_000_000)),
            ("1E", Some(1_000_000_000_000_000_000_000)),
            ("2E-3", Some(2)),
            ("1n", Some(1)),
            ("-1", Some(-1000)),
            ("", None),
            ("x", None),
            ("1Zi", None),
            ("1.2.3", None),
            ("1 Gi", None),
            ("--1", None),
            ("1e99", None),
            ("1e-2147483648", None),
            ("1e2147483648", None),
        ] {
            assert_eq!(milli(text), wanted, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,30}") {
            let _ = milli(&text);
        }

        #[test]
        fn any_exponent_is_read_or_refused(number in "[+-]?[0-9.]{0,20}", exponent: i32) {
            for exponent in [exponent, exponent % 20, i32::MIN, i32::MAX] {
                let _ = milli(&format!("{number}e{exponent}"));
            }
        }
    }
}
