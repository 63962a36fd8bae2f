//! What a snapshot has written itself, from the items of its tree.

use std::{collections::HashSet, io, os::fd::AsFd};

use super::raw;

/// Type of the items that describe the data of files.
const EXTENT_DATA: u32 = 108;
/// Where the numbers of files begin; below are the filesystem's own objects.
const FIRST_INODE: u64 = 256;
const HEADER: usize = 32;
/// What an item for data has before the data itself, or before where that is on disk.
const INLINE_AT: usize = 21;
const INLINE: u8 = 0;

/// Extents remembered at once: about 10 MB, enough for 7 GB in pages of 8 KiB. With more, parts
/// of one extent far from each other may count it twice.
const MAX_EXTENTS: usize = 900_000;
/// Each returns some 700 items: no subvolume has as many.
const MAX_SEARCHES: usize = 1_000_000;

/// Bytes of file data that a writable snapshot has written since it was made, which is about
/// what its deletion gives back. For a subvolume that is no snapshot: all of its data.
///
/// Compressed data counts as stored, an extent fully as long as any part of it is in use, and a
/// deleted file until it is closed. Extents that a later snapshot of this one shares count
/// although they would stay. Not counted are the nodes of trees that the writes have copied,
/// nested subvolumes, and data not yet written out, which has no place on disk: `syncfs` before
/// includes it.
///
/// Reads only those parts of the tree that were written since; safe beside writers, whose
/// changes during the call are seen or not. Needs `CAP_SYS_ADMIN`. For a plain directory: the
/// subvolume that it lies in. `ENOTTY` when it is not on Btrfs.
pub fn own_bytes(directory: impl AsFd) -> io::Result<u64> {
    let directory = directory.as_fd();
    let info = raw::subvolume_info(directory)?;
    let is_snapshot = info.parent_uuid != [0; 16];
    // The commit that makes the snapshot first writes what its source has in memory, in the
    // same transaction; whatever is written to the snapshot comes in a later one.
    let since = if is_snapshot {
        info.transactions[1] + 1
    } else {
        0
    };

    let mut search = raw::Search::new();
    let mut sum = Sum::new(since);
    let mut next = Some((FIRST_INODE, 0));
    for _ in 0..MAX_SEARCHES {
        let Some(from) = next else {
            return Ok(sum.bytes);
        };
        let (count, bytes) = search.find(directory, key(from, since))?;
        next = None;
        for item in items(bytes, count) {
            let item = item?;
            sum.add(&item)?;
            next = item.next();
        }
    }
    Err(io::Error::other(format!(
        "more than {MAX_SEARCHES} searches for extents"
    )))
}

fn key((inode, offset): (u64, u64), since: u64) -> raw::SearchKey {
    raw::SearchKey {
        tree: 0,
        min_inode: inode,
        max_inode: u64::MAX,
        min_offset: offset,
        max_offset: u64::MAX,
        min_transaction: since,
        max_transaction: u64::MAX,
        // Together with inode and offset the ends of one range of keys: items of other types
        // are between them.
        min_type: EXTENT_DATA,
        max_type: EXTENT_DATA,
        items: u32::MAX,
        unused: [0; 9],
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Item<'a> {
    inode: u64,
    kind: u32,
    offset: u64,
    body: &'a [u8],
}

impl Item<'_> {
    /// Inode and offset of the first extent that can come behind this item.
    fn next(&self) -> Option<(u64, u64)> {
        if self.kind < EXTENT_DATA {
            return Some((self.inode, 0));
        }
        let behind = self.offset.checked_add(1);
        match behind.filter(|_| self.kind == EXTENT_DATA) {
            Some(offset) => Some((self.inode, offset)),
            None => Some((self.inode.checked_add(1)?, 0)),
        }
    }
}

/// The items of a search's answer: the first `count` in `bytes`.
fn items(mut bytes: &[u8], count: u32) -> impl Iterator<Item = io::Result<Item<'_>>> {
    (0..count).map(move |_| {
        let (header, rest) = bytes.split_at_checked(HEADER).ok_or_else(cut_off)?;
        let length = u32::from_ne_bytes(array(header, 28)?);
        let length = usize::try_from(length).map_err(|_| cut_off())?;
        let (body, rest) = rest.split_at_checked(length).ok_or_else(cut_off)?;
        bytes = rest;
        Ok(Item {
            inode: u64::from_ne_bytes(array(header, 8)?),
            kind: u32::from_ne_bytes(array(header, 24)?),
            offset: u64::from_ne_bytes(array(header, 16)?),
            body,
        })
    })
}

#[derive(Debug, PartialEq, Eq)]
enum Data {
    Inline {
        bytes: u64,
    },
    /// `at`: its first byte on disk.
    Extent {
        at: u64,
        bytes: u64,
    },
}

/// The transaction that wrote the data, and where it is.
fn data(body: &[u8]) -> io::Result<(u64, Data)> {
    let generation = u64::from_le_bytes(array(body, 0)?);
    let [kind] = array(body, 20)?;
    let data = if kind == INLINE {
        let bytes = body.len().checked_sub(INLINE_AT).ok_or_else(cut_off)?;
        Data::Inline {
            bytes: bytes as u64,
        }
    } else {
        Data::Extent {
            at: u64::from_le_bytes(array(body, INLINE_AT)?),
            bytes: u64::from_le_bytes(array(body, INLINE_AT + 8)?),
        }
    };
    Ok((generation, data))
}

struct Sum {
    since: u64,
    bytes: u64,
    seen: HashSet<u64>,
}

impl Sum {
    fn new(since: u64) -> Self {
        Self {
            since,
            bytes: 0,
            seen: HashSet::new(),
        }
    }

    fn add(&mut self, item: &Item<'_>) -> io::Result<()> {
        if item.kind != EXTENT_DATA {
            return Ok(());
        }
        let (generation, data) = data(item.body)?;
        // A node written lately holds older items as well.
        if generation < self.since {
            return Ok(());
        }
        self.bytes = self.bytes.saturating_add(match data {
            Data::Inline { bytes } => bytes,
            // Each place overwritten in the midst of an extent leaves another item for it.
            Data::Extent { at, bytes } => {
                if self.seen.len() == MAX_EXTENTS {
                    self.seen.clear();
                }
                if self.seen.insert(at) { bytes } else { 0 }
            }
        });
        Ok(())
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> io::Result<[u8; N]> {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.copied().ok_or_else(cut_off)
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "an item of the tree is cut off")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const NEW: u64 = 50;

    fn item(inode: u64, kind: u32, offset: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(77_u64.to_ne_bytes());
        bytes.extend(inode.to_ne_bytes());
        bytes.extend(offset.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(u32::try_from(body.len()).unwrap().to_ne_bytes());
        bytes.extend(body);
        bytes
    }

    fn head(generation: u64, kind: u8) -> Vec<u8> {
        let mut body = generation.to_le_bytes().to_vec();
        body.extend(999_999_u64.to_le_bytes());
        body.extend([0; 4]);
        body.push(kind);
        body
    }

    fn extent(generation: u64, kind: u8, at: u64, bytes: u64) -> Vec<u8> {
        let mut body = head(generation, kind);
        for field in [at, bytes, 888_888, 777_777] {
            body.extend(field.to_le_bytes());
        }
        assert_eq!(body.len(), 53);
        body
    }

    fn inline(generation: u64, data: &[u8]) -> Vec<u8> {
        let mut body = head(generation, INLINE);
        body.extend(data);
        body
    }

    fn sum(buffer: &[u8], count: u32) -> io::Result<u64> {
        let mut sum = Sum::new(NEW);
        for item in items(buffer, count) {
            sum.add(&item?)?;
        }
        Ok(sum.bytes)
    }

    #[test]
    fn items_follow_one_another_without_padding() {
        let mut buffer = item(300, 1, 0, &[1; 7]);
        buffer.extend(item(301, 84, u64::MAX, &[]));
        buffer.extend(item(301, EXTENT_DATA, 4096, &[2; 3]));
        buffer.extend([0xff; 100]);
        let found: Vec<_> = items(&buffer, 3).map(Result::unwrap).collect();
        let expected = [
            (300, 1, 0, &[1; 7][..]),
            (301, 84, u64::MAX, &[]),
            (301, EXTENT_DATA, 4096, &[2; 3]),
        ]
        .map(|(inode, kind, offset, body)| Item {
            inode,
            kind,
            offset,
            body,
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn sums_new_data_only_and_each_extent_once() {
        let bodies = [
            (EXTENT_DATA, extent(NEW - 1, 1, 1 << 20, 4096)),
            (EXTENT_DATA, extent(NEW, 1, 2 << 20, 8192)),
            (EXTENT_DATA, extent(NEW + 9, 1, 3 << 20, 16384)),
            // The other side of a place overwritten in it.
            (EXTENT_DATA, extent(NEW, 1, 2 << 20, 8192)),
            // Allocated in advance, and a hole.
            (EXTENT_DATA, extent(NEW, 2, 4 << 20, 1 << 20)),
            (EXTENT_DATA, extent(NEW, 1, 0, 0)),
            (EXTENT_DATA, inline(NEW - 1, &[7; 1000])),
            (EXTENT_DATA, inline(NEW, &[7; 100])),
            // The same bytes with another meaning.
            (84, extent(NEW, 1, 9 << 20, 4096)),
        ];
        let buffer: Vec<u8> = bodies
            .iter()
            .flat_map(|(kind, body)| item(300, *kind, 0, body))
            .collect();
        let count = u32::try_from(bodies.len()).unwrap();
        assert_eq!(sum(&buffer, count).unwrap(), 8192 + 16384 + (1 << 20) + 100);
    }

    #[test]
    fn what_is_cut_off_is_an_error() {
        let whole = item(300, EXTENT_DATA, 0, &extent(NEW, 1, 1 << 20, 4096));
        assert_eq!(sum(&whole, 1).unwrap(), 4096);
        for length in 0..whole.len() {
            let error = sum(&whole[..length], 1).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{length}");
        }
        assert!(sum(&whole, 2).is_err());
        for body in [&head(NEW, 1)[..], &head(NEW, INLINE)[..20]] {
            assert!(sum(&item(300, EXTENT_DATA, 0, body), 1).is_err());
        }
    }

    #[test]
    fn search_goes_on_behind_the_last_item() {
        let next = |kind, offset| {
            let body = &[];
            let inode = 300;
            Item {
                inode,
                kind,
                offset,
                body,
            }
            .next()
        };
        assert_eq!(next(1, 5), Some((300, 0)));
        assert_eq!(next(EXTENT_DATA, 4096), Some((300, 4097)));
        assert_eq!(next(EXTENT_DATA, u64::MAX), Some((301, 0)));
        assert_eq!(next(EXTENT_DATA + 1, 0), Some((301, 0)));
        let last = Item {
            inode: u64::MAX,
            kind: 200,
            offset: 0,
            body: &[],
        };
        assert_eq!(last.next(), None);
    }

    #[test]
    fn memory_for_extents_is_bounded() {
        let mut sum = Sum::new(NEW);
        let count = MAX_EXTENTS as u64 + 10;
        for number in 1..=count {
            let body = extent(NEW, 1, number << 12, 4096);
            let offset = number << 12;
            sum.add(&Item {
                inode: 300,
                kind: EXTENT_DATA,
                offset,
                body: &body,
            })
            .unwrap();
        }
        assert_eq!(sum.bytes, count * 4096);
        assert_eq!(sum.seen.len(), 10);
    }
}
