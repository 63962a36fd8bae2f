//! The passwords of leases: derived, so that a retry gets the same one and nothing has to be kept.

use data_encoding::BASE32_NOPAD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::storage::ids::{EndpointId, NodeKey};

/// Counts up when every password of a node is to change.
const EPOCH: u32 = 1;
/// Bytes of a password; 160 bits.
const LENGTH: usize = 20;

/// The password of an endpoint, of letters and digits: 32 characters out of a-z and 2-7.
pub fn password(key: &NodeKey, endpoint: &EndpointId) -> String {
    let bytes = derive(key, "password", endpoint.as_str());
    BASE32_NOPAD.encode(&bytes[..LENGTH]).to_ascii_lowercase()
}

/// What the gateway derives salts from.
pub fn salt_key(key: &NodeKey) -> [u8; 32] {
    derive(key, "salts", "")
}

fn derive(key: &NodeKey, purpose: &str, of: &str) -> [u8; 32] {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key.as_bytes())
        .expect("a key of any length should do");
    for part in [purpose.as_bytes(), &EPOCH.to_be_bytes(), of.as_bytes()] {
        mac.update(part);
        mac.update(&[0]);
    }
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_its_endpoint_s_and_its_node_s() {
        let key = NodeKey::from_bytes([7; 32]);
        let one: EndpointId = "abcdefghij234".parse().unwrap();
        let other: EndpointId = "abcdefghij235".parse().unwrap();
        assert_eq!(password(&key, &one), password(&key, &one));
        assert_ne!(password(&key, &one), password(&key, &other));
        assert_ne!(
            password(&key, &one),
            password(&NodeKey::from_bytes([8; 32]), &one)
        );
        assert_eq!(password(&key, &one).len(), 32);
    }
}
