//! What the documentation shows, as it stands there.

use std::fs;

use crate::stage::{Done, Stage, path, psql};

/// The commands of README.md's section about Kubernetes, without the cluster itself.
fn readme_lines() -> String {
    let readme = fs::read_to_string(path("README.md")).unwrap();
    let (_, section) = readme.split_once("## Try it on Kubernetes").unwrap();
    let mut blocks = section.split("```");
    let mut commands = blocks
        .by_ref()
        .filter_map(|block| block.strip_prefix("sh\n"));
    commands
        .find(|block| block.starts_with("kubectl apply"))
        .unwrap()
        .to_owned()
}

pub(crate) async fn the_lines_of_the_readme_work(stage: &mut Stage) -> Done {
    let printed = stage.shell(&readme_lines()).await?;
    assert!(printed.contains("the same in every branch"), "{printed}");
    stage.full("shop", 4).await?;
    let counts = stage.branches().await?;
    assert!(
        counts.len() >= 2,
        "an agent on each node, and not {counts:?}"
    );
    assert!(
        counts.values().filter(|count| **count > 0).count() >= 2,
        "{counts:?}"
    );
    for node in counts.keys() {
        stage.node_ready(node, "True", "").await?;
    }
    stage.release("mine").await?;
    stage.nothing_leased().await?;
    assert!(stage.secrets().get_opt("mine").await?.is_none());
    stage.full("shop", 4).await
}

pub(crate) async fn jobs_of_the_documentation_work(stage: &mut Stage) -> Done {
    let page = fs::read_to_string(path("docs/leases.md"))?;
    for name in ["environment", "files"] {
        let file = path(&format!("examples/kubernetes/job-{name}.yaml"));
        assert!(
            page.contains(&fs::read_to_string(&file)?),
            "docs/leases.md should show {file}"
        );
        stage.kubectl(&["apply", "--filename", &file]).await?;
        stage
            .wait("condition=Complete", &[&format!("job/{name}")])
            .await?;
        let printed = stage.kubectl(&["logs", &format!("job/{name}")]).await?;
        assert!(printed.contains("written by a Job"), "{printed}");
        assert_eq!(printed.contains("sslmode is verify-full"), name == "files");
        let count = "SELECT count(*) FROM notes WHERE body = 'written by a Job'";
        assert_eq!(
            stage.psql(name, count).await?,
            "1",
            "in the branch of {name}"
        );
    }
    verify_full_refuses_another_name(stage).await?;
    for name in ["environment", "files"] {
        let file = path(&format!("examples/kubernetes/job-{name}.yaml"));
        stage.kubectl(&["delete", "--filename", &file]).await?;
    }
    stage.nothing_leased().await?;
    stage.drop_pool("shop").await
}

/// Without which the other half says nothing.
async fn verify_full_refuses_another_name(stage: &Stage) -> Done {
    let directory = tempfile::tempdir()?;
    let ca = directory.path().join("ca.crt");
    fs::write(&ca, stage.entry("files", "ca.crt").await?)?;
    let mut of = std::collections::BTreeMap::new();
    for key in ["host", "port", "username", "password", "database"] {
        of.insert(key, stage.entry("files", key).await?);
    }
    let connection = |host: &str| {
        format!(
            "host={host} hostaddr={} port={} user={} password={} dbname={} sslmode=verify-full sslrootcert={}",
            of["host"],
            of["port"],
            of["username"],
            of["password"],
            of["database"],
            ca.display()
        )
    };
    assert_eq!(psql(&connection(&of["host"]), "SELECT 1").await?, "1");
    let refused = psql(&connection("other.internal"), "SELECT 1").await;
    let why = format!("{:?}", refused.expect_err("another name should be refused"));
    assert!(why.contains("does not match host name"), "{why}");
    Ok(())
}
