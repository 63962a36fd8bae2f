//! The `sql` source: an empty data directory, filled by scripts.

use branchpool_sys::btrfs;

use super::{
    Report, Script,
    error::Result,
    facts::Origin,
    files,
    tool::{self, Tool, blocking},
    workshop::{Doing, Workshop, identifier},
};

/// Sorts by code point, the same with every version of the C library.
const LOCALE: &str = "C.UTF-8";

/// Makes the subvolume and runs `initdb` in it.
pub(super) async fn create(workshop: &Workshop<'_>, report: &Report<'_>) -> Result<Origin> {
    report.step("Creating an empty data directory");
    let (path, owner) = (workshop.data_dir.clone(), workshop.env.disk_user.clone());
    blocking("making the subvolume", &workshop.data_dir, move || {
        let (parent, name) = files::split(&path);
        btrfs::create_subvolume(btrfs::open_dir(parent)?, name)?;
        files::make_private(&path, &owner)
    })
    .await?;
    let data_dir = workshop.data_dir.display().to_string();
    let args = [
        "-D", &data_dir, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale", LOCALE,
        "--no-sync", "--no-instructions",
    ];
    let tool = Tool {
        program: &workshop.installation.program("initdb"),
        args: args.map(str::to_owned).to_vec(),
        env: Vec::new(),
        stdin: None,
    };
    tool::run(workshop, tool).await?.expect_success("initdb")?;
    Origin::read(workshop).await
}

/// Creates the pool's role and database and runs the scripts, as the role: what they make
/// belongs to it. Meanwhile it is a superuser, since dumps create extensions and the like.
pub(super) async fn load(workshop: &Workshop<'_>, scripts: &[Script], report: &Report<'_>) -> Result<()> {
    report.step("Creating the pool's role and database");
    let (role, database) = (&workshop.spec.role, &workshop.spec.database);
    let mut session = workshop.session("postgres").await?;
    let role_name = identifier(role);
    if role != "postgres" {
        session
            .execute(&format!("CREATE ROLE {role_name} LOGIN SUPERUSER"))
            .await
            .doing(format!("creating the role {role}"))?;
    }
    let database_name = identifier(database);
    let verb = if database == "postgres" { "ALTER" } else { "CREATE" };
    let to = if database == "postgres" { "TO " } else { "" };
    session
        .execute(&format!("{verb} DATABASE {database_name} OWNER {to}{role_name}"))
        .await
        .doing(format!("creating the database {database}"))?;
    session.terminate().await;
    for (number, script) in scripts.iter().enumerate() {
        report.step(format!(
            "Running the script {} ({} of {})",
            script.name,
            number + 1,
            scripts.len()
        ));
        workshop.run_script("script", script, role).await?;
    }
    Ok(())
}
