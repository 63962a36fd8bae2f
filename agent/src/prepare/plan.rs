//! What to do about the devices that were found. Knows neither files nor tools.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use snafu::{Snafu, ensure};

use super::superblock::{Member, Uuid};

/// A block device as it was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Free of links.
    pub path: PathBuf,
    pub content: Content,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// No signature of anything, zeros at both ends, and nobody uses it.
    Blank,
    Btrfs(Member),
    /// What `mkfs.btrfs` leaves when it is killed; the kernel mounts no such device.
    Unfinished {
        label: String,
    },
    /// Whatever else, in words that complete "has": `an ext4 filesystem`.
    Other(String),
}

/// What is at the mount point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A directory without entries, or none yet.
    Empty,
    /// Something of this many entries that is none of the devices found.
    Taken,
    /// The Btrfs filesystem of a device found.
    Mounted(Uuid),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub mount_point: PathBuf,
    pub label: String,
    /// How many devices must be found; `None`: one or more.
    pub count: Option<usize>,
    /// Whether a filesystem may be made on blank devices.
    pub format: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// It is mounted already.
    Ready,
    Mount(Vec<PathBuf>),
    /// Make the filesystem, then mount it.
    Format(Vec<PathBuf>, Profiles),
}

/// How Btrfs spreads blocks over devices.
///
/// Data is striped and kept once: it is a copy, and a Local SSD that dies takes its data along however
/// it is kept. Metadata is kept twice: one block of it that cannot be read would otherwise take every
/// branch of the node, and it is a small part of what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profiles {
    pub data: &'static str,
    pub metadata: &'static str,
}

impl Profiles {
    pub fn of(devices: usize) -> Self {
        if devices > 1 {
            Self {
                data: "raid0",
                metadata: "raid1",
            }
        } else {
            Self {
                data: "single",
                metadata: "dup",
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq, Snafu)]
pub enum Refusal {
    #[snafu(display(
        "no device was found; check the patterns given with --devices against the names below /dev on this node"
    ))]
    NoDevices,
    #[snafu(display(
        "{found} devices were found and {wanted} are wanted ({list}); correct --devices or --count"
    ))]
    Count {
        found: usize,
        wanted: usize,
        list: List,
    },
    #[snafu(display(
        "nothing was touched, because {found}; when that may be lost, erase it by hand with: wipefs --all {devices}"
    ))]
    Foreign { found: String, devices: List },
    #[snafu(display(
        "the devices found belong to {count} filesystems with the label {label}; narrow --devices to those of one, or give another --label"
    ))]
    TwoSets { count: usize, label: String },
    #[snafu(display(
        "the filesystem {label} is on {wanted} devices and only {found} of them were found ({list}){blank}; bring \
         the missing one back, or, when its branches may be lost, erase the others by hand with: wipefs --all {list}"
    ))]
    Incomplete {
        label: String,
        wanted: u64,
        found: usize,
        list: List,
        blank: String,
    },
    #[snafu(display(
        "{list} are the same device of filesystem {label}, as after a copy; erase the copy by hand with wipefs --all"
    ))]
    Copies { label: String, list: List },
    #[snafu(display(
        "the devices are blank ({list}) and formatting is off; allow it with --format (in the chart: agent.storage.prepare.format=true)"
    ))]
    FormatOff { list: List },
    #[snafu(display(
        "{} is not empty and is no mount of {list}; move away what is there, for it would be hidden", path.display()
    ))]
    PlaceTaken { path: PathBuf, list: List },
    #[snafu(display(
        "{} has another filesystem of these devices mounted; unmount it, or correct --label", path.display()
    ))]
    OtherMounted { path: PathBuf },
}

/// Paths with spaces between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List(Vec<PathBuf>);

impl fmt::Display for List {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, path) in self.0.iter().enumerate() {
            if index > 0 {
                formatter.write_str(" ")?;
            }
            write!(formatter, "{}", path.display())?;
        }
        Ok(())
    }
}

fn list<'a>(devices: impl IntoIterator<Item = &'a Device>) -> List {
    List(paths(devices))
}

fn paths<'a>(devices: impl IntoIterator<Item = &'a Device>) -> Vec<PathBuf> {
    devices
        .into_iter()
        .map(|device| device.path.clone())
        .collect()
}

/// Devices in the order of their paths, each once.
pub fn plan(devices: &[Device], place: &Place, wanted: &Wanted) -> Result<Plan, Refusal> {
    ensure!(!devices.is_empty(), NoDevicesSnafu);
    if let Some(count) = wanted.count {
        ensure!(
            devices.len() == count,
            CountSnafu {
                found: devices.len(),
                wanted: count,
                list: list(devices)
            }
        );
    }
    refuse_foreign(devices, &wanted.label)?;
    let members: Vec<_> = devices
        .iter()
        .filter_map(|device| match &device.content {
            Content::Btrfs(member) => Some((device, member)),
            _ => None,
        })
        .collect();
    match members.first() {
        Some((_, first)) => existing(devices, &members, first.filesystem, place, wanted),
        None => new(devices, place, wanted),
    }
}

fn refuse_foreign(devices: &[Device], label: &str) -> Result<(), Refusal> {
    let foreign: Vec<_> = devices
        .iter()
        .filter_map(|device| Some((device, foreign(&device.content, label)?)))
        .collect();
    let found: Vec<_> = foreign
        .iter()
        .map(|(device, what)| format!("{} has {what}", device.path.display()))
        .collect();
    ensure!(
        foreign.is_empty(),
        ForeignSnafu {
            found: found.join(", "),
            devices: list(foreign.iter().map(|(device, _)| *device))
        }
    );
    Ok(())
}

/// In words, when it is not ours.
fn foreign(content: &Content, label: &str) -> Option<String> {
    match content {
        Content::Other(what) => Some(what.clone()),
        Content::Btrfs(member) if member.label != label => Some(format!(
            "a Btrfs filesystem with the label {:?}",
            member.label
        )),
        Content::Unfinished { label: found } if found != label => Some(format!(
            "an unfinished Btrfs filesystem with the label {found:?}"
        )),
        Content::Blank | Content::Btrfs(_) | Content::Unfinished { .. } => None,
    }
}

/// A filesystem that was made before.
fn existing(
    devices: &[Device],
    members: &[(&Device, &Member)],
    filesystem: Uuid,
    place: &Place,
    wanted: &Wanted,
) -> Result<Plan, Refusal> {
    let label = wanted.label.as_str();
    let mut sets: Vec<_> = members
        .iter()
        .map(|(_, member)| member.filesystem)
        .collect();
    sets.sort_unstable();
    sets.dedup();
    ensure!(
        sets.len() == 1,
        TwoSetsSnafu {
            count: sets.len(),
            label
        }
    );
    let mut ids: Vec<_> = members.iter().map(|(_, member)| member.device).collect();
    ids.sort_unstable();
    ids.dedup();
    let found = list(members.iter().map(|(device, _)| *device));
    ensure!(
        ids.len() == members.len(),
        CopiesSnafu { label, list: found }
    );
    // After an interrupted change of the set its members may differ; the larger number is safe.
    let wanted_members = members
        .iter()
        .map(|(_, member)| member.devices)
        .max()
        .unwrap_or(0);
    if usize::try_from(wanted_members) != Ok(members.len()) {
        let others = devices
            .iter()
            .filter(|device| !matches!(device.content, Content::Btrfs(_)));
        let others = list(others);
        let blank = match others.0.len() {
            0 => String::new(),
            _ => format!(", besides {others}, not part of it"),
        };
        return IncompleteSnafu {
            label,
            wanted: wanted_members,
            found: members.len(),
            list: found,
            blank,
        }
        .fail();
    }
    match place {
        Place::Mounted(mounted) if *mounted == filesystem => Ok(Plan::Ready),
        Place::Mounted(_) => OtherMountedSnafu {
            path: &wanted.mount_point,
        }
        .fail(),
        Place::Taken => PlaceTakenSnafu {
            path: &wanted.mount_point,
            list: found,
        }
        .fail(),
        Place::Empty => Ok(Plan::Mount(found.0)),
    }
}

/// Devices without a filesystem.
fn new(devices: &[Device], place: &Place, wanted: &Wanted) -> Result<Plan, Refusal> {
    let list = list(devices);
    ensure!(wanted.format, FormatOffSnafu { list });
    ensure!(
        *place == Place::Empty,
        PlaceTakenSnafu {
            path: &wanted.mount_point,
            list
        }
    );
    Ok(Plan::Format(list.0, Profiles::of(devices.len())))
}

impl Plan {
    /// What is about to be done, or was, in one sentence without an end.
    pub fn describe(&self, place: &Path, label: &str) -> String {
        let place = place.display();
        match self {
            Self::Ready => format!("filesystem {label} is mounted at {place} already"),
            Self::Mount(devices) => {
                format!(
                    "filesystem {label} on {}: mount at {place}",
                    List(devices.clone())
                )
            }
            Self::Format(devices, Profiles { data, metadata }) => format!(
                "filesystem {label} on {}: make it (data {data}, metadata {metadata}) and mount it at {place}",
                List(devices.clone())
            ),
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
