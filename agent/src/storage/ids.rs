//! Names that the agent gives to what it makes.

use std::{
    fmt, fs,
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    str::FromStr,
};

use data_encoding::{Encoding, Specification};
use hmac::{Hmac, KeyInit, Mac};
use rand::Rng;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::Sha256;
use snafu::{ResultExt, Snafu, ensure};

/// Characters of an id.
pub const ID_LENGTH: usize = 13;
/// Of a [`BranchId`], the random ones; the others prove who made it.
const RANDOM_LENGTH: usize = 8;
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
const MAX_POOL_UID: usize = 63;

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(super)))]
pub enum Error {
    #[snafu(display("{text:?} is no id: expected {ID_LENGTH} characters out of a-z and 2-7"))]
    InvalidId { text: String },
    #[snafu(display(
        "{text:?} is no pool uid: expected 1 to {MAX_POOL_UID} characters out of a-z, 0-9 and \
         '-', neither first nor last a '-'"
    ))]
    InvalidPoolUid { text: String },
    #[snafu(display(
        "cannot {action} the node key {}: {source}; check the permissions and the free space of \
         its directory", path.display()
    ))]
    NodeKeyFile {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[snafu(display(
        "the node key {} has {length} bytes instead of 32; restore it from a backup: without \
         it the agent takes no branch on this disk for its own", path.display()
    ))]
    NodeKeyLength { path: PathBuf, length: usize },
}

/// Secret of this node, from which the tags of branch ids are derived.
#[derive(Clone, PartialEq, Eq)]
pub struct NodeKey([u8; 32]);

impl NodeKey {
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads the key, or makes it (mode 0600) when there is none.
    ///
    /// Fails when the file cannot be read or written, or holds something else.
    pub fn load_or_create(path: &Path) -> Result<Self, Error> {
        match fs::read(path) {
            Ok(bytes) => {
                let length = bytes.len();
                let bytes = bytes.try_into().ok().ok_or(Error::NodeKeyLength {
                    path: path.into(),
                    length,
                })?;
                Ok(Self(bytes))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::create(path),
            Err(source) => Err(source).context(NodeKeyFileSnafu {
                action: "read",
                path,
            }),
        }
    }

    fn create(path: &Path) -> Result<Self, Error> {
        let key = Self(rand::random());
        let directory = path.parent().unwrap_or(Path::new("/"));
        let partial = path.with_extension("key.partial");
        let write = || -> io::Result<()> {
            let mut options = fs::OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(&partial)?;
            // One left by an earlier start may have another mode.
            file.set_permissions(fs::Permissions::from_mode(0o600))?;
            file.write_all(&key.0)?;
            file.sync_all()?;
            fs::rename(&partial, path)?;
            fs::File::open(directory)?.sync_all()
        };
        write().context(NodeKeyFileSnafu {
            action: "write",
            path,
        })?;
        Ok(key)
    }
}

impl fmt::Debug for NodeKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("NodeKey(…)")
    }
}

type Characters = [u8; ID_LENGTH];

fn parse(text: &str) -> Result<Characters, Error> {
    let characters: Characters =
        text.as_bytes()
            .try_into()
            .ok()
            .ok_or_else(|| Error::InvalidId {
                text: shortened(text),
            })?;
    let valid = characters
        .iter()
        .all(|character| ALPHABET.contains(character));
    ensure!(valid, InvalidIdSnafu { text });
    Ok(characters)
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

fn random_characters(rng: &mut impl Rng) -> Characters {
    let mut characters = [0; ID_LENGTH];
    rng.fill_bytes(&mut characters);
    characters.map(|byte| ALPHABET[usize::from(byte & 31)])
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Characters);

        impl $name {
            pub fn as_str(&self) -> &str {
                str::from_utf8(&self.0).expect("an id should consist of ASCII characters")
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self, Error> {
                parse(text).map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.pad(self.as_str())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "{}({})", stringify!($name), self.as_str())
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                self.as_str()
            }
        }

        impl AsRef<Path> for $name {
            fn as_ref(&self) -> &Path {
                Path::new(self.as_str())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    };
}

id! {
    /// Name of a branch: 8 random characters and 5 that only the holder of the node key can
    /// make, so that the agent knows its own work again on a disk that others write to as well.
    BranchId
}

impl BranchId {
    pub fn generate(key: &NodeKey, rng: &mut impl Rng) -> Self {
        let mut characters = random_characters(rng);
        let tag = tag(key, &characters);
        characters[RANDOM_LENGTH..].copy_from_slice(&tag);
        Self(characters)
    }

    /// Whether an agent with this key made the id.
    pub fn is_authentic(&self, key: &NodeKey) -> bool {
        // Not in constant time: ids are no secrets, and a directory's name is no place to guess.
        self.0[RANDOM_LENGTH..] == tag(key, &self.0)
    }
}

id! {
    /// Public name of a lease's address, which may move from branch to branch. All random.
    EndpointId
}

impl EndpointId {
    pub fn generate(rng: &mut impl Rng) -> Self {
        Self(random_characters(rng))
    }
}

fn tag(key: &NodeKey, characters: &Characters) -> [u8; ID_LENGTH - RANDOM_LENGTH] {
    let mut mac = Hmac::<Sha256>::new_from_slice(&key.0).expect("any key length should do");
    mac.update(b"branch-id/1\0");
    mac.update(&characters[..RANDOM_LENGTH]);
    let digest = mac.finalize().into_bytes();
    let text = base32().encode(&digest);
    let mut tag = [0; ID_LENGTH - RANDOM_LENGTH];
    tag.copy_from_slice(&text.as_bytes()[..ID_LENGTH - RANDOM_LENGTH]);
    tag
}

fn base32() -> Encoding {
    let mut specification = Specification::new();
    specification
        .symbols
        .push_str("abcdefghijklmnopqrstuvwxyz234567");
    specification
        .encoding()
        .expect("the alphabet should be valid")
}

/// A pool's identity, which outlives changes of its name: a Kubernetes UID, or one derived from
/// the name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct PoolUid(String);

impl PoolUid {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PoolUid {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let valid = (1..=MAX_POOL_UID).contains(&text.len())
            && text
                .bytes()
                .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
            && !text.starts_with('-')
            && !text.ends_with('-');
        ensure!(
            valid,
            InvalidPoolUidSnafu {
                text: shortened(text)
            }
        );
        Ok(Self(text.into()))
    }
}

impl fmt::Display for PoolUid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(&self.0)
    }
}

impl<'de> Deserialize<'de> for PoolUid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}
