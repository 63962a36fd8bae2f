//! A Btrfs filesystem in a sparse file, for machines that have no other. Every function blocks.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::{fs::FlockOperation, io::Errno, mount::UnmountFlags};
use snafu::{OptionExt, ResultExt, Snafu, ensure};

/// Bytes below which Btrfs has no room for its own structures and a few branches.
pub const MIN_SIZE: u64 = 256 << 20;

/// Daemons and unprivileged shells often lack the sbin directories.
const TOOL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const SUPERBLOCK: u64 = 0x1_0000;
const SUPERBLOCK_MAGIC: &[u8; 8] = b"_BHRfS_M";
/// A loop device that was found may clear itself before it is mounted.
const MOUNT_ATTEMPTS: usize = 3;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("an image of {size} bytes is too small; give at least {MIN_SIZE} bytes"))]
    TooSmall { size: u64 },
    #[snafu(display("{tool} is not installed; install the Debian package {package}"))]
    ToolMissing {
        tool: &'static str,
        package: &'static str,
    },
    #[snafu(display("cannot run {tool}: {source}"))]
    ToolNotRun {
        tool: &'static str,
        source: io::Error,
    },
    #[snafu(display("{tool} failed for {path:?}: {message}"))]
    ToolFailed {
        tool: &'static str,
        path: PathBuf,
        message: String,
    },
    #[snafu(display(
        "{path:?} is not a Btrfs image; move it away, or give another path for the image"
    ))]
    NotAnImage { path: PathBuf },
    #[snafu(display(
        "{path:?} has something else mounted on it; unmount it, or give another directory"
    ))]
    MountPointTaken { path: PathBuf },
    #[snafu(display(
        "{action} {path:?} failed: {source}; check the permissions and the free space of its \
         directory"
    ))]
    Failed {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[snafu(display(
        "cannot unmount {path:?}: {source}; end the processes that use it (see fuser -m)"
    ))]
    Unmount { path: PathBuf, source: io::Error },
}

/// Image file and the directory that it is mounted on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopFile {
    image: PathBuf,
    mount_point: PathBuf,
}

impl LoopFile {
    /// Makes the image (sparse, `size` bytes) and the directory unless they exist, and mounts it
    /// unless it is. An image that exists keeps its content and size.
    ///
    /// Two calls, by whichever processes, never attach one image to two loop devices. The loop
    /// device clears itself with the last unmount.
    pub fn mount(image: &Path, size: u64, mount_point: &Path) -> Result<Self, Error> {
        let absolute = |path: &Path| {
            std::path::absolute(path).context(FailedSnafu {
                action: "finding",
                path,
            })
        };
        let this = Self {
            image: absolute(image)?,
            mount_point: absolute(mount_point)?,
        };
        let directory = this.image.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(directory).context(FailedSnafu {
            action: "making",
            path: directory,
        })?;
        let _lock = this.lock()?;
        this.ensure_image(size)?;
        let point = &this.mount_point;
        fs::create_dir_all(point).context(FailedSnafu {
            action: "making",
            path: point,
        })?;
        this.ensure_mounted()?;
        Ok(this)
    }

    pub fn image(&self) -> &Path {
        &self.image
    }

    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Unmounts it. Not mounted: no error. Fails while files on it are open.
    pub fn unmount(&self) -> Result<(), Error> {
        match rustix::mount::unmount(&self.mount_point, UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
            Err(error) => Err(io::Error::from(error)).context(UnmountSnafu {
                path: &self.mount_point,
            }),
        }
    }

    /// Held while an image is made, attached or mounted.
    fn lock(&self) -> Result<File, Error> {
        let path = with_suffix(&self.image, ".lock");
        let lock = || -> io::Result<File> {
            let file = File::options().create(true).append(true).open(&path)?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            Ok(file)
        };
        lock().context(FailedSnafu {
            action: "locking",
            path: &path,
        })
    }

    fn ensure_image(&self, size: u64) -> Result<(), Error> {
        match File::open(&self.image) {
            Ok(file) => {
                let mut magic = [0; 8];
                let is_image = file
                    .read_exact_at(&mut magic, SUPERBLOCK + 0x40)
                    .is_ok_and(|()| magic == *SUPERBLOCK_MAGIC);
                ensure!(is_image, NotAnImageSnafu { path: &self.image });
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.make_image(size),
            Err(source) => Err(source).context(FailedSnafu {
                action: "opening",
                path: &self.image,
            }),
        }
    }

    /// Only a complete filesystem gets the image's name; what a crash left is made anew.
    fn make_image(&self, size: u64) -> Result<(), Error> {
        ensure!(size >= MIN_SIZE, TooSmallSnafu { size });
        let partial = with_suffix(&self.image, ".partial");
        let create = || -> io::Result<File> {
            let file = File::create(&partial)?;
            file.set_len(size)?;
            Ok(file)
        };
        let file = create().context(FailedSnafu {
            action: "making",
            path: &partial,
        })?;
        // A second copy of the metadata in the same file would only be written twice.
        run(
            Tool {
                name: "mkfs.btrfs",
                package: "btrfs-progs",
            },
            &[
                "--quiet",
                "--force",
                "--metadata",
                "single",
                "--data",
                "single",
            ],
            &[&partial],
        )?;
        let publish = || -> io::Result<()> {
            file.sync_all()?;
            fs::rename(&partial, &self.image)?;
            File::open(self.image.parent().unwrap_or(Path::new("/")))?.sync_all()
        };
        publish().context(FailedSnafu {
            action: "making",
            path: &self.image,
        })
    }

    fn ensure_mounted(&self) -> Result<(), Error> {
        let mut attempt = 1;
        loop {
            let device = self.loop_device()?;
            if let Some(mounted) = mounted_device(&self.mount_point)? {
                ensure!(
                    device.is_some_and(|device| mounted == device),
                    MountPointTakenSnafu {
                        path: &self.mount_point
                    }
                );
                return Ok(());
            }
            let (options, source) = match &device {
                // Mounting the file would attach it to a second device.
                Some(device) => ("noatime", Path::new(device)),
                None => ("noatime,loop", self.image.as_path()),
            };
            let mounted = run(
                Tool {
                    name: "mount",
                    package: "mount",
                },
                &["-t", "btrfs", "-o", options],
                &[source, &self.mount_point],
            );
            if mounted.is_ok() || device.is_none() || attempt == MOUNT_ATTEMPTS {
                return mounted.map(drop);
            }
            attempt += 1;
        }
    }

    /// The loop device that the image is attached to.
    fn loop_device(&self) -> Result<Option<String>, Error> {
        let output = run(
            Tool {
                name: "losetup",
                package: "mount",
            },
            &["--noheadings", "--raw", "--output", "NAME", "--associated"],
            &[&self.image],
        )?;
        Ok(output
            .lines()
            .next()
            .map(|line| line.trim().to_owned())
            .filter(|name| !name.is_empty()))
    }
}

/// Source of the topmost mount on exactly this directory.
fn mounted_device(mount_point: &Path) -> Result<Option<String>, Error> {
    let path = Path::new("/proc/self/mountinfo");
    let table = fs::read_to_string(path).context(FailedSnafu {
        action: "reading",
        path,
    })?;
    let point = mount_point.canonicalize().context(FailedSnafu {
        action: "finding",
        path: mount_point,
    })?;
    let mounts = crate::preflight::mountinfo::parse(&table);
    Ok(mounts
        .into_iter()
        .rfind(|mount| mount.point == point)
        .map(|mount| mount.source))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[derive(Clone, Copy)]
struct Tool {
    name: &'static str,
    package: &'static str,
}

/// Runs a tool and returns what it printed. The paths are absolute, so none looks like an option.
fn run(tool: Tool, options: &[&str], paths: &[&Path]) -> Result<String, Error> {
    let Tool {
        name: tool,
        package,
    } = tool;
    let result = Command::new(tool)
        .args(options)
        .args(paths)
        .env("PATH", TOOL_PATH)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output();
    let output = match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return ToolMissingSnafu { tool, package }.fail();
        }
        other => other.context(ToolNotRunSnafu { tool })?,
    };
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let path = paths.first().context(ToolMissingSnafu { tool, package })?;
    let text = String::from_utf8_lossy(&output.stderr);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut message: String = lines
        .collect::<Vec<_>>()
        .join("; ")
        .chars()
        .take(500)
        .collect();
    if message.is_empty() {
        message = output.status.to_string();
    }
    ToolFailedSnafu {
        tool,
        path: *path,
        message,
    }
    .fail()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_names_its_package() {
        let tool = Tool {
            name: "mkfs.of-no-filesystem",
            package: "some-progs",
        };
        let error = run(tool, &[], &[Path::new("/")]).unwrap_err();
        let expected =
            "mkfs.of-no-filesystem is not installed; install the Debian package some-progs";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_failing_tool_is_quoted() {
        let tool = Tool {
            name: "losetup",
            package: "mount",
        };
        let error = run(tool, &["--no-such-option"], &[Path::new("/")]).unwrap_err();
        assert!(error.to_string().contains("--no-such-option"), "{error}");
    }
}
