//! The messages that a server sends during a login, and the packet that opens a session.

use bytes::{BufMut, Bytes, BytesMut};

use crate::startup::{Cancel, NEWEST_MINOR, Startup};

const VERSION_3_0: u32 = 3 << 16;

/// An error that ends the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fatal {
    code: &'static str,
    message: String,
    hint: Option<String>,
}

impl Fatal {
    pub(crate) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            hint: None,
        }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The one answer to an unknown user, a wrong password, and a lease that is gone.
    pub(crate) fn denied(user: &str) -> Self {
        let message = format!("password authentication failed for user \"{user}\"");
        Self::new("28P01", message)
    }

    pub(crate) fn terminated() -> Self {
        let message = "terminating connection due to administrator command";
        Self::new("57P01", message)
    }

    pub(crate) fn protocol(message: impl Into<String>) -> Self {
        Self::new("08P01", message)
    }

    pub(crate) fn put(&self, output: &mut BytesMut) {
        let severity = "FATAL";
        put_message(output, b'E', |output| {
            let mut field = |name, value: &str| {
                output.put_u8(name);
                put_string(output, value.as_bytes());
            };
            field(b'S', severity);
            field(b'V', severity);
            field(b'C', self.code);
            field(b'M', &self.message);
            if let Some(hint) = &self.hint {
                field(b'H', hint);
            }
            output.put_u8(0);
        });
    }
}

/// Codes of `Authentication` messages.
pub(crate) mod authentication {
    pub(crate) const OK: u32 = 0;
    pub(crate) const SASL: u32 = 10;
    pub(crate) const SASL_CONTINUE: u32 = 11;
    pub(crate) const SASL_FINAL: u32 = 12;
}

pub(crate) fn put_authentication_ok(output: &mut BytesMut) {
    put_authentication(output, authentication::OK, &[]);
}

pub(crate) fn put_sasl(output: &mut BytesMut, mechanisms: &[&str]) {
    put_message(output, b'R', |output| {
        output.put_u32(authentication::SASL);
        for mechanism in mechanisms {
            put_string(output, mechanism.as_bytes());
        }
        output.put_u8(0);
    });
}

pub(crate) fn put_sasl_continue(output: &mut BytesMut, data: &str) {
    put_authentication(output, authentication::SASL_CONTINUE, data.as_bytes());
}

pub(crate) fn put_sasl_final(output: &mut BytesMut, data: &str) {
    put_authentication(output, authentication::SASL_FINAL, data.as_bytes());
}

fn put_authentication(output: &mut BytesMut, code: u32, data: &[u8]) {
    put_message(output, b'R', |output| {
        output.put_u32(code);
        output.put_slice(data);
    });
}

pub(crate) fn put_parameter_status(output: &mut BytesMut, name: &str, value: &str) {
    put_message(output, b'S', |output| {
        put_string(output, name.as_bytes());
        put_string(output, value.as_bytes());
    });
}

pub(crate) fn put_backend_key(output: &mut BytesMut, key: &Cancel) {
    put_message(output, b'K', |output| {
        output.put_i32(key.process_id);
        output.put_slice(&key.secret);
    });
}

/// Ready, outside of a transaction.
pub(crate) fn put_ready_for_query(output: &mut BytesMut) {
    put_message(output, b'Z', |output| output.put_u8(b'I'));
}

/// Says which version is spoken, and that none of the protocol options is known.
pub(crate) fn put_negotiation(output: &mut BytesMut, startup: &Startup) {
    put_message(output, b'v', |output| {
        output.put_u32(VERSION_3_0 | u32::from(startup.minor.min(NEWEST_MINOR)));
        let options = &startup.protocol_options;
        output.put_u32(u32::try_from(options.len()).unwrap_or(u32::MAX));
        for option in options {
            put_string(output, option.as_bytes());
        }
    });
}

/// A client's start-up packet for the branch's server: of protocol 3.0, since versions and
/// protocol options end at the gateway.
pub(crate) fn put_startup(
    output: &mut BytesMut,
    role: &str,
    database: &[u8],
    parameters: &[(String, Bytes)],
) {
    put_sized(output, |output| {
        output.put_u32(VERSION_3_0);
        let own = [("user", role.as_bytes()), ("database", database)];
        let more = parameters
            .iter()
            .map(|(name, value)| (name.as_str(), &value[..]));
        for (name, value) in own.into_iter().chain(more) {
            put_string(output, name.as_bytes());
            put_string(output, value);
        }
        output.put_u8(0);
    });
}

fn put_message(output: &mut BytesMut, tag: u8, body: impl FnOnce(&mut BytesMut)) {
    output.put_u8(tag);
    put_sized(output, body);
}

fn put_sized(output: &mut BytesMut, body: impl FnOnce(&mut BytesMut)) {
    let start = output.len();
    output.put_u32(0);
    body(output);
    let length = u32::try_from(output.len() - start).unwrap_or(u32::MAX);
    output[start..start + 4].copy_from_slice(&length.to_be_bytes());
}

fn put_string(output: &mut BytesMut, string: &[u8]) {
    output.put_slice(string);
    output.put_u8(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_up_packet_is_read_as_it_was_written() {
        let parameters = vec![("options".to_owned(), Bytes::from_static(b"-c a=\xe9"))];
        let mut output = BytesMut::new();
        put_startup(&mut output, "app", b"shop", &parameters);
        let packet = output.freeze();
        assert_eq!(
            packet[..4],
            u32::try_from(packet.len()).unwrap().to_be_bytes()
        );
        let crate::startup::Packet::Startup(read) =
            crate::startup::Packet::parse(packet.slice(4..)).unwrap()
        else {
            panic!("it opens a session");
        };
        assert_eq!((read.user.as_str(), read.minor), ("app", 0));
        assert_eq!(read.database.as_deref(), Some(&b"shop"[..]));
        assert_eq!(read.parameters, parameters);
    }
}
