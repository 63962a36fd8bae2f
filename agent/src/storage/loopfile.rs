//! A Btrfs filesystem in a sparse file, for machines that have no other. Every function blocks.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use rustix::{fs::FlockOperation, io::Errno, mount::UnmountFlags};
use snafu::{ResultExt, Snafu, ensure};

use super::tool::{self, Tool};

/// Bytes below which Btrfs has no room for its own structures and a few branches.
pub const MIN_SIZE: u64 = 256 << 20;

const MOUNT: Tool = Tool {
    name: "mount",
    package: "mount",
};
const LOSETUP: Tool = Tool {
    name: "losetup",
    package: "mount",
};
const SUPERBLOCK: u64 = 0x1_0000;
const SUPERBLOCK_MAGIC: &[u8; 8] = b"_BHRfS_M";
/// A loop device that was found may clear itself before it is mounted.
const MOUNT_ATTEMPTS: usize = 3;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("an image of {size} bytes is too small; give at least {MIN_SIZE} bytes"))]
    TooSmall { size: u64 },
    #[snafu(display("{source}"), context(false))]
    Tool { source: tool::Error },
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
        Tool::MKFS.run(
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
            let mounted = MOUNT.run(
                &["-t", "btrfs", "-o", options],
                &[source, &self.mount_point],
            );
            if mounted.is_ok() || device.is_none() || attempt == MOUNT_ATTEMPTS {
                mounted?;
                return Ok(());
            }
            attempt += 1;
        }
    }

    /// The loop device that the image is attached to.
    fn loop_device(&self) -> Result<Option<String>, Error> {
        let output = LOSETUP.run(
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
