//! What the agent accepts in names and numbers. The server refuses by these rules, and clients can
//! ask them before they send.

use crate::{
    DesiredPool, FieldError, LeaseRequest, PoolName, RenewRequest, ResetRequest, SqlRequest,
};

/// A year: the longest term that can be asked for; a pool's own limit is usually shorter.
pub const MAX_TTL_SECONDS: u64 = 31_536_000;
/// Characters, not bytes.
pub const MAX_HOLDER_CHARS: usize = 256;
pub const MAX_UID_BYTES: usize = 128;
pub const MAX_TOKEN_CHARS: usize = 253;
const MAX_LABEL_BYTES: usize = 63;

/// Lease and pool ids: `[A-Za-z0-9._-]{1,128}`, but `.` and `..`, which URLs do not carry.
pub fn uid(value: &str) -> Result<(), String> {
    let length = value.len();
    if !(1..=MAX_UID_BYTES).contains(&length) {
        return Err(format!(
            "must have 1 to {MAX_UID_BYTES} characters, has {length}"
        ));
    }
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if !value.bytes().all(allowed) || value == "." || value == ".." {
        return Err("may hold letters, digits, '.', '_' and '-' only".to_owned());
    }
    Ok(())
}

/// A DNS label (RFC 1123): 1 to 63 of `a-z`, `0-9` and `-`, neither first nor last a `-`.
pub fn dns_label(value: &str) -> Result<(), String> {
    let length = value.chars().count();
    if length == 0 {
        return Err("must not be empty".to_owned());
    }
    if length > MAX_LABEL_BYTES {
        return Err(format!(
            "has {length} characters; names here are DNS labels of at most {MAX_LABEL_BYTES}, choose a shorter one"
        ));
    }
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if !value.bytes().all(allowed) || value.starts_with('-') || value.ends_with('-') {
        return Err(
            "must be a DNS label: lower-case letters, digits and '-', not first or last a '-'"
                .to_owned(),
        );
    }
    Ok(())
}

pub fn ttl_seconds(value: u64) -> Result<(), String> {
    if (1..=MAX_TTL_SECONDS).contains(&value) {
        Ok(())
    } else {
        Err(format!(
            "must be from 1 to {MAX_TTL_SECONDS} seconds, is {value}"
        ))
    }
}

pub fn holder(value: &str) -> Result<(), String> {
    let length = value.chars().count();
    if length > MAX_HOLDER_CHARS {
        return Err(format!(
            "must have at most {MAX_HOLDER_CHARS} characters, has {length}"
        ));
    }
    no_control_characters(value)
}

pub fn reset_token(value: &str) -> Result<(), String> {
    let length = value.chars().count();
    if !(1..=MAX_TOKEN_CHARS).contains(&length) {
        return Err(format!(
            "must have 1 to {MAX_TOKEN_CHARS} characters, has {length}"
        ));
    }
    no_control_characters(value)
}

fn no_control_characters(value: &str) -> Result<(), String> {
    if value.chars().any(char::is_control) {
        return Err("must not hold control characters".to_owned());
    }
    Ok(())
}

/// A request body with rules beyond its types.
pub trait Check {
    /// Every field that is out of range, with its path in the body; empty when all is well.
    fn check(&self) -> Vec<FieldError>;
}

impl Check for LeaseRequest {
    fn check(&self) -> Vec<FieldError> {
        let PoolName { namespace, name } = &self.pool;
        refusals([
            ("pool.namespace", dns_label(namespace)),
            ("pool.name", dns_label(name)),
            ("ttlSeconds", self.ttl_seconds.map_or(Ok(()), ttl_seconds)),
            ("holder", self.holder.as_deref().map_or(Ok(()), holder)),
        ])
    }
}

impl Check for RenewRequest {
    fn check(&self) -> Vec<FieldError> {
        refusals([("ttlSeconds", self.ttl_seconds.map_or(Ok(()), ttl_seconds))])
    }
}

impl Check for ResetRequest {
    fn check(&self) -> Vec<FieldError> {
        refusals([("token", reset_token(&self.token))])
    }
}

impl Check for SqlRequest {
    fn check(&self) -> Vec<FieldError> {
        let query = if self.query.contains('\0') {
            Err("must not hold a zero byte".to_owned())
        } else {
            Ok(())
        };
        refusals([("query", query)])
    }
}

impl Check for DesiredPool {
    fn check(&self) -> Vec<FieldError> {
        let spec = if self.spec.is_object() {
            Ok(())
        } else {
            Err("must be an object, the spec of a BranchPool".to_owned())
        };
        refusals([
            ("namespace", dns_label(&self.namespace)),
            ("name", dns_label(&self.name)),
            ("spec", spec),
        ])
    }
}

fn refusals<const N: usize>(checks: [(&str, Result<(), String>); N]) -> Vec<FieldError> {
    checks
        .into_iter()
        .filter_map(|(field, result)| Some(FieldError::new(field, result.err()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_stay_within_what_a_path_segment_carries() {
        for good in ["a", "A.b_c-9", "0", "...", &"x".repeat(128)] {
            assert_eq!(uid(good), Ok(()), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a b", "ä", "a\n", &"x".repeat(129)] {
            assert!(uid(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn labels_follow_rfc_1123() {
        for good in ["a", "0", "a-b", &"x".repeat(63)] {
            assert_eq!(dns_label(good), Ok(()), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a_b", "ä", &"x".repeat(64)] {
            assert!(dns_label(bad).is_err(), "{bad:?}");
        }
        assert!(dns_label(&"x".repeat(253)).unwrap_err().contains("253"));
    }

    #[test]
    fn terms_and_holders_have_both_ends_checked() {
        assert!(ttl_seconds(0).is_err());
        assert!(ttl_seconds(1).is_ok());
        assert!(ttl_seconds(MAX_TTL_SECONDS).is_ok());
        assert!(ttl_seconds(MAX_TTL_SECONDS + 1).is_err());
        assert!(holder(&"ü".repeat(256)).is_ok());
        assert!(holder(&"ü".repeat(257)).is_err());
        assert!(holder("a\u{7f}").is_err());
        assert!(reset_token("").is_err());
    }
}
