//! The packets that open a connection, read without IO.

use std::ops::RangeInclusive;

use bytes::{Buf, Bytes};
use snafu::{OptionExt, ResultExt, Snafu, ensure};

/// Newest minor version of protocol 3 that is spoken.
pub const NEWEST_MINOR: u16 = 2;
const MAJOR: u16 = 3;

const CANCEL: u32 = 80_877_102;
const TLS: u32 = 80_877_103;
const GSS: u32 = 80_877_104;
/// Lengths of the secret in a cancel request: 4 in protocol 3.0, up to 256 in 3.2.
const SECRET: RangeInclusive<usize> = 4..=256;

#[derive(Debug, PartialEq, Eq, Snafu)]
pub enum Error {
    #[snafu(display("invalid startup packet: {detail}"))]
    Malformed { detail: &'static str },

    #[snafu(display(
        "unsupported frontend protocol {major}.{minor}: server supports 3.0 to 3.{NEWEST_MINOR}"
    ))]
    Version { major: u16, minor: u16 },

    #[snafu(display("no PostgreSQL user name specified in startup packet"))]
    NoUser,

    #[snafu(display("invalid startup packet: {what} is not UTF-8"))]
    NotUtf8 {
        what: &'static str,
        source: std::str::Utf8Error,
    },
}

#[derive(Debug, PartialEq, Eq)]
pub enum Packet {
    /// `SSLRequest`
    Tls,
    /// `GSSENCRequest`
    Gss,
    Cancel(Cancel),
    Startup(Startup),
}

/// Whose query to cancel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cancel {
    pub process_id: i32,
    pub secret: Bytes,
}

/// A `StartupMessage`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Startup {
    /// As asked for; above [`NEWEST_MINOR`] it has to be negotiated.
    pub minor: u16,
    /// As on the wire.
    pub user: String,
    /// `None` also when it is empty, as Postgres has it.
    pub database: Option<Bytes>,
    /// Whether the parameter `replication` is there, with any value.
    pub replication: bool,
    /// Names of `_pq_.` protocol options. None is known.
    pub protocol_options: Vec<String>,
    /// Everything else in the order of the packet, `replication` included.
    pub parameters: Vec<(String, Bytes)>,
}

impl Packet {
    /// Reads a packet without its length word.
    pub fn parse(mut body: Bytes) -> Result<Self, Error> {
        let detail = "it is too short";
        let code = body.try_get_u32().ok().context(MalformedSnafu { detail })?;
        match code {
            TLS | GSS => {
                let detail = "a request for encryption has no content";
                ensure!(body.is_empty(), MalformedSnafu { detail });
                Ok(if code == TLS { Self::Tls } else { Self::Gss })
            }
            CANCEL => {
                let detail = "invalid length of a cancel request";
                let process_id = body.try_get_i32().ok().context(MalformedSnafu { detail })?;
                ensure!(SECRET.contains(&body.len()), MalformedSnafu { detail });
                Ok(Self::Cancel(Cancel {
                    process_id,
                    secret: body,
                }))
            }
            version => Startup::parse(version, body).map(Self::Startup),
        }
    }
}

impl Startup {
    fn parse(version: u32, mut body: Bytes) -> Result<Self, Error> {
        let [a, b, c, d] = version.to_be_bytes();
        let (major, minor) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        ensure!(major == MAJOR, VersionSnafu { major, minor });
        let mut made = Self {
            minor,
            user: String::new(),
            database: None,
            replication: false,
            protocol_options: Vec::new(),
            parameters: Vec::new(),
        };
        loop {
            let name = text(&c_string(&mut body)?, "the name of a parameter")?;
            if name.is_empty() {
                break;
            }
            let value = c_string(&mut body)?;
            made.set(name, value)?;
        }
        let detail = "expected terminator as last byte";
        ensure!(body.is_empty(), MalformedSnafu { detail });
        ensure!(!made.user.is_empty(), NoUserSnafu);
        Ok(made)
    }

    fn set(&mut self, name: String, value: Bytes) -> Result<(), Error> {
        match name.as_str() {
            "user" => self.user = text(&value, "the user name")?,
            "database" => self.database = Some(value).filter(|value| !value.is_empty()),
            _ if name.starts_with("_pq_.") => self.protocol_options.push(name),
            _ => {
                self.replication |= name == "replication";
                self.parameters.push((name, value));
            }
        }
        Ok(())
    }

    /// The minor version that is spoken, once negotiated.
    pub fn spoken_minor(&self) -> u16 {
        self.minor.min(NEWEST_MINOR)
    }

    /// Whether the client has to be told what of its wishes is not there.
    pub fn needs_negotiation(&self) -> bool {
        self.minor > NEWEST_MINOR || !self.protocol_options.is_empty()
    }
}

/// Takes a string with its zero byte from the front.
fn c_string(body: &mut Bytes) -> Result<Bytes, Error> {
    let detail = "a string has no end";
    let end = body
        .iter()
        .position(|byte| *byte == 0)
        .context(MalformedSnafu { detail })?;
    let string = body.split_to(end);
    body.advance(1);
    Ok(string)
}

fn text(bytes: &[u8], what: &'static str) -> Result<String, Error> {
    str::from_utf8(bytes)
        .map(str::to_owned)
        .context(NotUtf8Snafu { what })
}

#[cfg(test)]
mod tests {
    use bytes::{BufMut, BytesMut};

    use super::*;

    fn packet_of(code: u32, content: &[u8]) -> Result<Packet, Error> {
        let mut body = BytesMut::new();
        body.put_u32(code);
        body.put_slice(content);
        Packet::parse(body.freeze())
    }

    fn startup(content: &[u8]) -> Result<Startup, Error> {
        packet_of(3 << 16, content).map(|packet| match packet {
            Packet::Startup(startup) => startup,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn parameters_keep_order_and_bytes() {
        let packet =
            startup(b"user\0app.x\0options\0-c a=b\0database\0app\0application_name\0\xe9\0\0");
        let packet = packet.unwrap();
        assert_eq!(packet.user, "app.x");
        assert_eq!(packet.database.as_deref(), Some(&b"app"[..]));
        assert_eq!(
            packet.parameters,
            [
                ("options".to_owned(), Bytes::from_static(b"-c a=b")),
                ("application_name".to_owned(), Bytes::from_static(b"\xe9")),
            ]
        );
        assert!(!packet.replication && !packet.needs_negotiation());
    }

    #[test]
    fn an_empty_database_is_none() {
        assert_eq!(startup(b"user\0u\0database\0\0\0").unwrap().database, None);
    }

    #[test]
    fn what_is_not_there_is_negotiated() {
        let packet = startup(b"user\0u\0_pq_.x\0y\0replication\0no\0\0").unwrap();
        assert!(packet.replication && packet.needs_negotiation());
        assert_eq!(packet.protocol_options, ["_pq_.x"]);
        for (minor, spoken, negotiated) in [(0, 0, false), (2, 2, false), (9999, 2, true)] {
            let packet = packet_of((3 << 16) | minor, b"user\0u\0\0");
            let Ok(Packet::Startup(packet)) = packet else {
                panic!("3.{minor} is understood");
            };
            assert_eq!(packet.spoken_minor(), spoken);
            assert_eq!(packet.needs_negotiation(), negotiated);
        }
    }

    #[test]
    fn broken_packets() {
        for content in [
            &b""[..],
            b"user",
            b"user\0u",
            b"user\0u\0",
            b"user\0u\0\0x",
            b"user\0u\0options\0\0",
        ] {
            let error = startup(content).unwrap_err();
            assert!(matches!(error, Error::Malformed { .. }), "{content:?}");
        }
        assert_eq!(startup(b"\0").unwrap_err(), Error::NoUser);
        assert_eq!(startup(b"user\0\0\0").unwrap_err(), Error::NoUser);
        let error = startup(b"user\0\xff\0\0").unwrap_err();
        assert!(matches!(error, Error::NotUtf8 { .. }));
        let old = Error::Version { major: 2, minor: 0 };
        assert_eq!(packet_of(2 << 16, b"").unwrap_err(), old);
    }

    #[test]
    fn requests() {
        assert_eq!(packet_of(TLS, b"").unwrap(), Packet::Tls);
        assert_eq!(packet_of(GSS, b"").unwrap(), Packet::Gss);
        packet_of(TLS, b"x").unwrap_err();
        let Packet::Cancel(cancel) = packet_of(CANCEL, b"\0\0\0\x07\x01\x02\x03\x04").unwrap()
        else {
            panic!("it is a cancel request");
        };
        assert_eq!(cancel.process_id, 7);
        assert_eq!(&cancel.secret[..], [1, 2, 3, 4]);
        packet_of(CANCEL, b"\0\0\0\x07\x01\x02\x03").unwrap_err();
        packet_of(CANCEL, &[0; 4 + 257]).unwrap_err();
    }
}
