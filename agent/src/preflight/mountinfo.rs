//! The kernel's table of mounts.

use std::{ffi::OsString, os::unix::ffi::OsStringExt, path::PathBuf};

/// One line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) id: u64,
    /// Directory of the filesystem that is mounted.
    pub(crate) root: PathBuf,
    pub(crate) point: PathBuf,
    pub(crate) filesystem: String,
    pub(crate) source: String,
    /// Options of this mount, then those of the filesystem.
    pub(crate) options: Vec<String>,
}

/// Lines that are not of the documented form are left out.
pub(crate) fn parse(table: &str) -> Vec<Mount> {
    table.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Mount> {
    // Optional fields end with a lone hyphen.
    let (of_mount, of_filesystem) = line.split_once(" - ")?;
    let mut of_mount = of_mount.split(' ');
    let id = of_mount.next()?.parse().ok()?;
    let root = unescape(of_mount.nth(2)?).into();
    let point = unescape(of_mount.next()?).into();
    let mount_options = of_mount.next()?;
    let mut of_filesystem = of_filesystem.split(' ');
    let filesystem = of_filesystem.next()?.to_owned();
    let source = unescape(of_filesystem.next()?)
        .to_string_lossy()
        .into_owned();
    let filesystem_options = of_filesystem.next().unwrap_or_default();
    let options = mount_options
        .split(',')
        .chain(filesystem_options.split(','))
        .map(str::to_owned)
        .collect();
    Some(Mount {
        id,
        root,
        point,
        filesystem,
        source,
        options,
    })
}

/// Space, tab, newline and backslash are written as a backslash and three octal digits.
fn unescape(field: &str) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = (first == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        if let Some(byte) = escaped {
            bytes.push(byte);
            rest = &tail[3..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_apart() {
        let table = "36 35 98:0 / /mnt/a\\040b rw,noatime master:1 shared:2 - btrfs /dev/loop0 \
                     rw,nodatacow,subvol=/\nnonsense\n";
        let mounts = parse(table);
        assert_eq!(mounts.len(), 1);
        assert_eq!(mounts[0].id, 36);
        assert_eq!(mounts[0].root, PathBuf::from("/"));
        assert_eq!(mounts[0].point, PathBuf::from("/mnt/a b"));
        assert_eq!(mounts[0].filesystem, "btrfs");
        assert_eq!(mounts[0].source, "/dev/loop0");
        assert_eq!(
            mounts[0].options,
            ["rw", "noatime", "rw", "nodatacow", "subvol=/"]
        );
    }

    #[test]
    fn a_line_without_optional_fields_is_taken_apart() {
        let mounts = parse("1 0 0:1 / / ro - tmpfs none rw,size=4k");
        assert_eq!(mounts[0].source, "none");
        assert_eq!(mounts[0].options, ["ro", "rw", "size=4k"]);
    }

    #[test]
    fn a_backslash_that_starts_no_escape_stays() {
        assert_eq!(unescape("a\\9b\\0"), OsString::from("a\\9b\\0"));
        assert_eq!(unescape("\\134\\011"), OsString::from("\\\t"));
    }
}
