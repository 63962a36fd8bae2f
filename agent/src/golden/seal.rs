//! From a stopped server's directory to a read-only image.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
};

use branchpool_sys::btrfs;
use snafu::{ResultExt, ensure};

use super::{
    checks,
    error::{CheckSnafu, ControlSnafu, KillSnafu, NotShutDownSnafu, Result},
    files, scrub,
    tool::blocking,
    workshop::Workshop,
};
use crate::postgres::{
    control::ControlData,
    server::{self, log_excerpt},
};

/// What is known of an image once it is sealed.
pub(super) struct Sealed {
    pub(super) control: ControlData,
    /// On disk, in bytes; shared with the source in part.
    pub(super) bytes: u64,
    pub(super) uuid: [u8; 16],
}

/// Verifies the clean shutdown, removes leftovers, flushes, and moves the image to its place.
pub(super) async fn seal(workshop: &Workshop<'_>) -> Result<Sealed> {
    // Scripts may have left processes; from here on nobody else touches the files.
    server::kill_group(&workshop.env.group).await.context(KillSnafu)?;
    let control = ControlData::read(workshop.installation, &workshop.data_dir)
        .await
        .context(ControlSnafu)?;
    let state = control.state.clone();
    let log = || log_excerpt(&workshop.log, 0);
    ensure!(control.is_clean(), NotShutDownSnafu { state, log: log() });

    let (path, owner) = (workshop.data_dir.clone(), workshop.env.disk_user.clone());
    let survey = blocking("cleaning", &workshop.data_dir, move || {
        let before = files::survey(&path, &owner)?;
        if before.links.is_empty() {
            scrub::files(&path, &owner)?;
            return files::survey(&path, &owner);
        }
        Ok(before)
    })
    .await?;
    // A script can make links as well, into which no work as root must run.
    checks::links(&workshop.data_dir, &survey).context(CheckSnafu)?;

    let (building, layout, spec) = (&workshop.data_dir, &workshop.env.layout, workshop.spec);
    let pool_dir = layout.golden_pool(&spec.pool);
    let target = layout.golden_generation(&spec.pool, spec.generation);
    let from = building.clone();
    let uuid = blocking("sealing", building, move || {
        let mut builder = fs::DirBuilder::new();
        match builder.mode(0o700).create(&pool_dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
        // Servers reach an image only through its clones.
        fs::set_permissions(&pool_dir, fs::Permissions::from_mode(0o700))?;
        btrfs::syncfs(btrfs::open_dir(&from)?)?;
        // In this order: a read-only subvolume cannot be moved to another directory.
        fs::rename(&from, &target)?;
        let image = btrfs::open_dir(&target)?;
        btrfs::set_read_only(&image, true)?;
        btrfs::sync(&image)?;
        Ok(btrfs::info(&image)?.uuid)
    })
    .await?;
    Ok(Sealed {
        control,
        bytes: survey.bytes,
        uuid,
    })
}
