//! Where cgroups are mounted, and the directories that all groups of an agent are below.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Component, Path, PathBuf},
};

use snafu::{OptionExt, ResultExt, ensure};

use super::{Controller, CreateSnafu, Error, Group, NameSnafu, NotMountedSnafu, ReadSnafu};

/// The leaf that the agent itself lives in where a group with controllers may hold no processes.
const OWN_LEAF: &str = "agent";

/// The mounted hierarchies and this process's place in each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    pub unified: Option<Place>,
    /// Of `cpu`, `memory`, `pids` and `freezer`, those mounted as v1.
    pub v1: BTreeMap<String, Place>,
}

/// A mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The mount point.
    pub top: PathBuf,
    /// The directory of this process's own group.
    pub own: PathBuf,
}

impl Layout {
    pub fn detect() -> Result<Self, Error> {
        let read = |path: &str| fs::read_to_string(path).context(ReadSnafu { path });
        Ok(Self::parse(
            &read("/proc/self/mountinfo")?,
            &read("/proc/self/cgroup")?,
        ))
    }

    fn parse(mountinfo: &str, memberships: &str) -> Self {
        let mut layout = Self::default();
        for mount in mountinfo.lines().filter_map(Mount::parse) {
            if mount.kind == "cgroup2" {
                let own = membership(memberships, "");
                layout.unified.get_or_insert_with(|| mount.place(own));
                continue;
            }
            for name in ["cpu", "memory", "pids", "freezer"] {
                if mount.options.split(',').any(|option| option == name) {
                    let place = mount.place(membership(memberships, name));
                    layout.v1.entry(name.to_owned()).or_insert(place);
                }
            }
        }
        layout
    }
}

struct Mount<'a> {
    root: &'a str,
    point: String,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (head, tail) = line.split_once(" - ")?;
        let mut head = head.split(' ').skip(3);
        let mut tail = tail.split(' ');
        let kind = tail.next()?;
        if kind != "cgroup" && kind != "cgroup2" {
            return None;
        }
        Some(Self {
            root: head.next()?,
            point: unescape(head.next()?),
            kind,
            options: tail.nth(1)?,
        })
    }

    fn place(&self, own: &str) -> Place {
        let top = PathBuf::from(&self.point);
        let below = Path::new(own).strip_prefix(self.root).ok();
        // A path with `..` lies outside this cgroup namespace, and cannot be reached.
        let reachable = below.filter(|path| !path.components().any(|c| c == Component::ParentDir));
        let own = reachable.map_or_else(|| top.clone(), |path| top.join(path));
        // Joining an empty path leaves a slash at the end.
        let own = own.components().collect();
        Place { top, own }
    }
}

/// mountinfo writes blanks and backslashes in octal.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\012", "\n")
        .replace("\\134", "\\")
}

/// This process's path in the hierarchy of a controller; the unified one has the empty name.
fn membership<'a>(memberships: &'a str, controller: &str) -> &'a str {
    let path_in = |line: &'a str| {
        let (names, path) = line.split_once(':')?.1.split_once(':')?;
        names
            .split(',')
            .any(|name| name == controller)
            .then_some(path)
    };
    memberships.lines().find_map(path_in).unwrap_or("/")
}

/// The directories that hold all groups of one agent.
#[derive(Clone, Debug)]
pub struct Base {
    pub(super) unified: Option<Unified>,
    pub(super) v1: BTreeMap<Controller, PathBuf>,
    /// Only where there is no unified hierarchy.
    pub(super) freezer: Option<PathBuf>,
    missing: Vec<Controller>,
}

#[derive(Clone, Debug)]
pub(super) struct Unified {
    pub(super) directory: PathBuf,
    pub(super) controllers: Vec<Controller>,
}

impl Base {
    /// Makes `branchpool-<name>` in every hierarchy, or takes the one that is there.
    ///
    /// On v2 this process and its parent, the supervisor, move into a leaf beside the slots when
    /// controllers could not be switched on otherwise.
    pub fn open(layout: &Layout, name: &str) -> Result<Self, Error> {
        check_name(name)?;
        let directory = format!("branchpool-{name}");
        let unified = layout
            .unified
            .as_ref()
            .map(|place| open_unified(place, &directory))
            .transpose()?;
        let mut v1 = BTreeMap::new();
        for controller in Controller::ALL {
            if let Some(place) = layout.v1.get(controller.name()) {
                v1.insert(controller, make(below_own(place, &directory))?);
            }
        }
        let freezer = match (&unified, layout.v1.get("freezer")) {
            (None, Some(place)) => Some(make(below_own(place, &directory))?),
            _ => None,
        };
        ensure!(unified.is_some() || freezer.is_some(), NotMountedSnafu);
        let has = |controller: &Controller| {
            v1.contains_key(controller)
                || unified
                    .as_ref()
                    .is_some_and(|unified| unified.controllers.contains(controller))
        };
        let missing = Controller::ALL
            .into_iter()
            .filter(|controller| !has(controller))
            .collect();
        Ok(Self {
            unified,
            v1,
            freezer,
            missing,
        })
    }

    /// `v2`, `v1`, or `v1+unified` for v1 controllers with a v2 hierarchy beside them.
    pub fn kind(&self) -> &'static str {
        match (self.unified.is_some(), self.v1.is_empty()) {
            (true, true) => "v2",
            (true, false) => "v1+unified",
            (false, _) => "v1",
        }
    }

    /// Controllers that this machine does not offer: their limits are not in force.
    pub fn missing(&self) -> &[Controller] {
        &self.missing
    }

    /// The group of that name, made if it is not there. One without processes is made anew on v2,
    /// as an earlier agent may have died between killing and [renewing](Group::kill) it.
    pub fn group(&self, name: &str) -> Result<Group, Error> {
        check_name(name)?;
        let group = Group::new(self, name);
        for directory in group.membership().v1 {
            make(directory)?;
        }
        if let Some(unified) = &group.membership().unified {
            super::group::make_anew(unified)?;
        }
        Ok(group)
    }

    /// The names of the groups that exist, whoever made them, sorted.
    pub fn names(&self) -> Result<Vec<String>, Error> {
        let mut names = Vec::new();
        for directory in self.directories() {
            let entries = fs::read_dir(directory).context(ReadSnafu { path: directory })?;
            for entry in entries {
                let entry = entry.context(ReadSnafu { path: directory })?;
                let is_group = entry.file_type().is_ok_and(|kind| kind.is_dir());
                let name = entry.file_name().into_string().ok();
                names.extend(name.filter(|name| is_group && name != OWN_LEAF));
            }
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Removes the base directories, once all groups are removed. A v2 base that this process lives
    /// in stays.
    pub fn remove(self) -> Result<(), Error> {
        for directory in self.directories() {
            if !directory.join(OWN_LEAF).exists() {
                super::group::remove(directory)?;
            }
        }
        Ok(())
    }

    fn directories(&self) -> impl Iterator<Item = &Path> {
        let unified = self
            .unified
            .iter()
            .map(|unified| unified.directory.as_path());
        unified.chain(self.v1.values().chain(&self.freezer).map(PathBuf::as_path))
    }
}

fn check_name(name: &str) -> Result<(), Error> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let good = !name.is_empty() && name.len() <= 64 && name.chars().all(allowed);
    ensure!(good && name != OWN_LEAF, NameSnafu { name });
    Ok(())
}

/// Below the process's own group; an agent that moved itself into its leaf finds its base again.
fn below_own(place: &Place, directory: &str) -> PathBuf {
    let moved = Path::new(directory).join(OWN_LEAF);
    if place.own.ends_with(&moved) {
        let base = place.own.parent();
        return base.map_or_else(|| place.own.join(directory), Path::to_owned);
    }
    place.own.join(directory)
}

fn open_unified(place: &Place, directory: &str) -> Result<Unified, Error> {
    let mut base = below_own(place, directory);
    let own = base.parent().context(NotMountedSnafu)?;
    let offered = controllers(&own.join("cgroup.controllers"))?;
    if offered.is_empty() {
        let directory = make(base)?;
        let controllers = Vec::new();
        return Ok(Unified {
            directory,
            controllers,
        });
    }
    let moved_before = base.join(OWN_LEAF).exists();
    if !is_root(own) && !moved_before && !only_ours(own)? {
        // Others live in our group, so it cannot hand out controllers; the top one perhaps can.
        base = place.top.join(directory);
    }
    make(base.clone())?;
    let parent = base.parent().context(NotMountedSnafu)?;
    if !is_root(parent) && only_ours(parent)? {
        let leaf = make(base.join(OWN_LEAF))?;
        for pid in pids(parent)? {
            enter(&leaf, pid)?;
        }
    }
    let controllers = enable(parent, &offered)?;
    let controllers = enable(&base, &controllers)?;
    let directory = base;
    Ok(Unified {
        directory,
        controllers,
    })
}

/// The true root has no events, and may hold processes and hand out controllers at once.
fn is_root(group: &Path) -> bool {
    !group.join("cgroup.events").exists()
}

/// Whether this process and its ancestors in the group are all that is in it.
fn only_ours(group: &Path) -> Result<bool, Error> {
    let ours = [Some(rustix::process::getpid()), rustix::process::getppid()];
    let ours = ours.map(|pid| pid.map_or(0, |pid| pid.as_raw_nonzero().get().cast_unsigned()));
    Ok(pids(group)?.iter().all(|pid| ours.contains(pid)))
}

fn enter(group: &Path, pid: u32) -> Result<(), Error> {
    let file = group.join("cgroup.procs");
    match super::group::write(&file, &pid.to_string()) {
        // Ended meanwhile.
        Err(Error::Write { source, .. }) if source.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        other => other,
    }
}

/// Hands controllers on to the groups below; gives those that are then handed on.
fn enable(group: &Path, wanted: &[Controller]) -> Result<Vec<Controller>, Error> {
    let file = group.join("cgroup.subtree_control");
    for controller in wanted {
        // One at a time, so that one that is refused does not take the others along. What is in
        // force is read below.
        let _ = fs::write(&file, format!("+{}", controller.name()));
    }
    controllers(&file)
}

fn controllers(file: &Path) -> Result<Vec<Controller>, Error> {
    let text = fs::read_to_string(file).context(ReadSnafu { path: file })?;
    let names: Vec<_> = text.split_ascii_whitespace().collect();
    let there = |controller: &Controller| names.contains(&controller.name());
    Ok(Controller::ALL.into_iter().filter(there).collect())
}

pub(super) fn pids(group: &Path) -> Result<Vec<u32>, Error> {
    let path = group.join("cgroup.procs");
    match fs::read_to_string(&path) {
        Ok(text) => Ok(text.lines().filter_map(|line| line.parse().ok()).collect()),
        Err(error) if is_gone(&error) => Ok(Vec::new()),
        Err(error) => Err(error).context(ReadSnafu { path }),
    }
}

/// A group that was removed is not there, or, when its file was already open, has no device.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn make(directory: PathBuf) -> Result<PathBuf, Error> {
    match fs::create_dir(&directory) {
        Ok(()) => Ok(directory),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(directory),
        Err(error) => Err(error).context(CreateSnafu { path: directory }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1_BESIDE_EMPTY_V2: &str = "\
30 29 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
31 29 0:27 / /sys/fs/cgroup/memory rw,relatime shared:4 - cgroup cgroup rw,memory
32 29 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
33 29 0:29 / /mnt/a\\040b rw - ext4 /dev/vda rw";

    #[test]
    fn finds_v1_controllers_with_v2_beside() {
        let layout = Layout::parse(
            V1_BESIDE_EMPTY_V2,
            "4:memory:/a/b\n2:cpu,cpuacct:/\n0::/x\n",
        );
        assert_eq!(
            layout.unified.unwrap().own,
            Path::new("/sys/fs/cgroup/unified/x")
        );
        assert_eq!(
            layout.v1["memory"].own,
            Path::new("/sys/fs/cgroup/memory/a/b")
        );
        let cpu = Path::new("/sys/fs/cgroup/cpu,cpuacct");
        assert_eq!(
            layout.v1["cpu"],
            Place {
                top: cpu.into(),
                own: cpu.into()
            }
        );
        assert!(!layout.v1.contains_key("pids"));
    }

    #[test]
    fn a_container_sees_its_own_part_of_a_hierarchy() {
        let layout = Layout::parse(
            "40 1 0:30 /docker/f00 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
             41 1 0:31 /../.. /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw",
            "1:memory:/docker/f00/inner\n0::/../other\n",
        );
        let memory = Path::new("/sys/fs/cgroup/memory");
        assert_eq!(layout.v1["memory"].own, memory.join("inner"));
        let unified = layout.unified.unwrap();
        assert_eq!(unified.own, unified.top);
    }

    #[test]
    fn an_agent_in_its_leaf_finds_its_base_again() {
        let place = |own: &str| Place {
            top: "/c".into(),
            own: own.into(),
        };
        let base = Path::new("/c/x/branchpool-n");
        assert_eq!(below_own(&place("/c/x"), "branchpool-n"), base);
        assert_eq!(
            below_own(&place("/c/x/branchpool-n/agent"), "branchpool-n"),
            base
        );
        assert_eq!(
            below_own(&place("/c/branchpool-m/agent"), "branchpool-n"),
            Path::new("/c/branchpool-m/agent/branchpool-n")
        );
    }

    #[test]
    fn names_cannot_leave_the_directory() {
        for bad in ["", "..", "a/b", "agent", "a b", &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert!(check_name("slot-7").is_ok());
    }
}
