//! A superuser who tries to take its branch from the agent, or to lead the agent astray.

use std::fmt::Write;

use crate::{
    inmate::{Inmate, superuser_pool},
    node::{Node, Setup, ask, wait_gone},
    starvation::{connect_patiently, restarted},
};

/// Settings that keep the agent in control, each with a value that would end that.
const CONTROL: [(&str, &str); 17] = [
    ("hba_file", "/nonexistent"),
    ("ident_file", "/nonexistent"),
    ("unix_socket_directories", "/nonexistent"),
    ("unix_socket_permissions", "0"),
    ("unix_socket_group", "nobody"),
    ("listen_addresses", "*"),
    ("port", "5433"),
    ("ssl", "on"),
    ("bonjour", "on"),
    ("logging_collector", "on"),
    ("log_destination", "csvlog"),
    ("archive_mode", "on"),
    ("restart_after_crash", "off"),
    ("huge_pages", "on"),
    ("shared_memory_type", "sysv"),
    ("fsync", "on"),
    ("full_page_writes", "on"),
];

async fn control_settings(client: &tokio_postgres::Client) -> String {
    let names = CONTROL.map(|(name, _)| format!("'{name}'")).join(",");
    let sql = format!(
        "SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings \
         WHERE name IN ({names}, 'config_file', 'data_directory')"
    );
    ask(client, &sql).await.unwrap()
}

async fn start() -> (Node, Inmate) {
    let node = Node::start(Setup::new(superuser_pool("items", 2, ""))).await;
    let inmate = Inmate::enter(&node, "items", "rebel").await;
    inmate
        .sql("INSERT INTO items VALUES (4, 'four'); CHECKPOINT")
        .await
        .unwrap();
    (node, inmate)
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_do_not_take_a_branch_from_the_agent() {
    let (mut node, inmate) = start().await;
    let before = control_settings(&inmate.client).await;
    for name in ["config_file", "data_directory"] {
        let refused = inmate
            .sql(&format!("ALTER SYSTEM SET {name} = '/nonexistent'"))
            .await
            .unwrap_err();
        assert!(refused.contains("cannot be changed"), "{refused}");
    }
    let mut lines = String::new();
    for (name, value) in CONTROL {
        // Some are refused at once, such as ssl without a certificate; the file takes all.
        let _refused = inmate
            .sql(&format!("ALTER SYSTEM SET {name} = '{value}'"))
            .await;
        // A value that is no value at all would stop the server, wherever it stands.
        if name != "bonjour" {
            writeln!(lines, "{name} = '{value}'").unwrap();
        }
    }
    // One that is the user's own shows that the file is read.
    lines.push_str("work_mem = '5432kB'\ndata_directory = '/nonexistent'\n");
    let write = format!(
        "cd {} && cat > postgresql.auto.conf <<'END'\n{lines}END\ncp postgresql.auto.conf postgresql.conf; echo 'local all all trust' > pg_hba.conf",
        inmate.data
    );
    let said = inmate.run(&write).await;
    assert!(said.ok, "{said:?}");
    assert_eq!(inmate.sql("SELECT pg_reload_conf()").await, Ok("t".into()));

    inmate.end("true").await;
    let lease = restarted(&node, "rebel", 1).await;
    assert_eq!(
        (&lease.host, &lease.branch),
        (&inmate.lease.host, &inmate.lease.branch)
    );
    let client = connect_patiently(&node, "rebel").await;
    assert_eq!(ask(&client, "SHOW work_mem").await.unwrap(), "5432kB");
    assert_eq!(control_settings(&client).await, before);
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "4"
    );

    // A setting that is the user's own, and lets no server start: the lease says so, and a reset
    // makes it good.
    ask(
        &client,
        "ALTER SYSTEM SET shared_preload_libraries = 'no_such_library'",
    )
    .await
    .unwrap();
    let rebel = Inmate::of(&node, lease).await;
    rebel.end("true").await;
    node.wait_lease("rebel", |lease| {
        lease.reason.as_deref() == Some("RestartFailed")
            && lease
                .message
                .as_deref()
                .is_some_and(|message| message.contains("no_such_library"))
    })
    .await;
    let reset = node.reset("rebel", "1").await.unwrap();
    assert_eq!(reset.host, inmate.lease.host);
    assert_ne!(reset.branch, inmate.lease.branch);
    let client = connect_patiently(&node, "rebel").await;
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );
    node.client.release("rebel", None).await.unwrap();
    node.wait_full("items").await;
    assert!(node.stop().success());
    node.assert_nothing_left();
}

/// Leaves these scripts' work in the data or socket directory, kills the server, and looks whether
/// it comes back with its data.
#[tokio::test(flavor = "multi_thread")]
async fn links_and_pipes_in_a_branch_neither_hang_nor_mislead_the_agent() {
    let (mut node, inmate) = start().await;
    let victim = Inmate::enter(&node, "items", "victim").await;
    let socket = format!("{}/.s.PGSQL.5432", inmate.sockets);
    let pid_file = format!("{}/postmaster.pid", inmate.data);
    let traps = [
        format!("rm {pid_file} && mkfifo {pid_file}"),
        format!("rm {pid_file} && ln -s /etc/shadow {pid_file}"),
        format!(
            "rm {pid_file} && ln -s {}/postmaster.pid {pid_file}",
            victim.data
        ),
        format!("sed -i 1s/.*/{}/ {pid_file}", victim.postmaster),
        format!("sed -i 1s/.*/{}/ {pid_file}", node.agent_pid()),
        format!("rm {socket} && mkfifo {socket}"),
        format!(
            "rm {socket} && ln -s {}/.s.PGSQL.5432 {socket}",
            victim.sockets
        ),
        format!("rm {socket} {socket}.lock && mkdir -p {socket}/x {socket}.lock/x"),
        format!("rm {socket}.lock && ln -s /etc/shadow {socket}.lock"),
        format!("chmod 000 {}", inmate.sockets),
    ];
    let mut restarts = 0;
    for trap in traps {
        let lease = node.client.get_lease("rebel").await.unwrap();
        let rebel = Inmate::of(&node, lease).await;
        rebel.end(&trap).await;
        restarts += 1;
        let lease = restarted(&node, "rebel", restarts).await;
        assert_eq!(lease.host, inmate.lease.host);
        let client = connect_patiently(&node, "rebel").await;
        let rows = ask(&client, "SELECT count(*) FROM items").await.unwrap();
        assert_eq!(rows, "4", "{trap}");
    }

    // And while it is given back, or the agent starts anew.
    let lease = node.client.get_lease("rebel").await.unwrap();
    let rebel = Inmate::of(&node, lease).await;
    let said = rebel
        .run(&format!(
            "rm {socket} {pid_file} && mkfifo {pid_file} && ln -s {}/.s.PGSQL.5432 {socket} && mkdir -m 0 {0}/closed {1}/closed && ln -s / {1}/link",
            rebel.data, rebel.sockets
        ))
        .await;
    assert!(said.ok, "{said:?}");
    let close = format!(
        "COPY (SELECT 1) TO PROGRAM 'cat; chmod 0 {} {}'",
        rebel.data, rebel.sockets
    );
    assert_eq!(rebel.sql(&close).await, Ok(String::new()));
    let agent = node.agent_pid();
    crate::node::send(agent, rustix::process::Signal::KILL);
    wait_gone(agent);
    node.wait_serving().await;
    node.wait_pool("items", |pool| pool.ready > 0).await;
    let reset = node.reset("rebel", "1").await.unwrap();
    assert_eq!(reset.host, inmate.lease.host);
    let client = connect_patiently(&node, "rebel").await;
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );
    node.client.release("rebel", None).await.unwrap();
    assert_eq!(
        node.postmaster_of(&victim.lease.branch),
        Some(victim.postmaster)
    );
    assert_eq!(
        victim.sql("SELECT count(*) FROM items").await,
        Ok("3".into())
    );
    node.wait_full("items").await;
    drop((inmate, victim));
    assert!(node.stop().success());
    node.assert_nothing_left();
}
