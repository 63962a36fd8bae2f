//! The part of a Btrfs superblock that says which filesystem a device is of.
//!
//! Read here and not by a tool, since the number of devices in the set is what no tool prints.

use std::fmt;

/// Where the superblock is on a device, in bytes.
pub const OFFSET: u64 = 0x1_0000;
pub const SIZE: usize = 4096;

const MAGIC: &[u8; 8] = b"_BHRfS_M";
/// Written by `mkfs.btrfs` until it is done.
const UNFINISHED: &[u8; 8] = b"!BHRfS_M";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Debug for Uuid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if [4, 6, 8, 10].contains(&index) {
                formatter.write_str("-")?;
            }
            write!(formatter, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A device of a filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub filesystem: Uuid,
    pub label: String,
    /// Number of this device in the filesystem, from 1.
    pub device: u64,
    /// How many devices the filesystem has.
    pub devices: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Superblock {
    Complete(Member),
    /// Label that the filesystem was to get.
    Unfinished(String),
}

/// `None` when there is none.
pub fn parse(block: &[u8; SIZE]) -> Option<Superblock> {
    let bytes = |at: usize, length: usize| &block[at..at + length];
    let number = |at: usize| {
        bytes(at, 8)
            .iter()
            .rev()
            .fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let text = bytes(0x12b, 256)
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    let label = String::from_utf8_lossy(text).into_owned();
    let magic = bytes(0x40, 8);
    if magic == UNFINISHED {
        return Some(Superblock::Unfinished(label));
    }
    if magic != MAGIC {
        return None;
    }
    let mut filesystem = [0; 16];
    filesystem.copy_from_slice(bytes(0x20, 16));
    Some(Superblock::Complete(Member {
        filesystem: Uuid(filesystem),
        label,
        device: number(0xc9),
        devices: number(0x88),
    }))
}
