//! Where the server listens, and whom it answers there.

use std::{os::unix::fs::PermissionsExt, os::unix::net::UnixListener, path::Path};

use branchpool_agent::http::{ListenError, Options, Server, Tcp};

use crate::raw::{Request, Running, local};

fn socket(path: &Path) -> Options {
    Options {
        socket: Some(path.to_owned()),
        ..Options::default()
    }
}

async fn refusal(options: &Options) -> String {
    Server::bind(options).await.unwrap_err().to_string()
}

#[tokio::test]
async fn the_socket_is_its_owners_only() {
    let server = Running::on_socket().await;
    let mode = server.socket.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    server.stop().await;
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "the standard library leaves the file behind");

    let server = Server::bind(&socket(&path)).await.unwrap();
    let error = Server::bind(&socket(&path)).await.unwrap_err();
    assert!(matches!(error, ListenError::InUse { .. }), "{error}");
    assert!(path.exists());
    drop(server);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_file_that_is_no_socket_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent.sock");
    std::fs::write(&path, "precious").unwrap();
    let says = refusal(&socket(&path)).await;
    assert!(says.contains("is no socket"), "{says}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[tokio::test]
async fn impossible_addresses_are_refused_with_a_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let long = directory.path().join("x".repeat(200));
    assert!(refusal(&socket(&long)).await.contains("107"));
    let missing = directory.path().join("missing/agent.sock");
    assert!(refusal(&socket(&missing)).await.contains("must exist"));
    assert!(refusal(&Options::default()).await.contains("give one"));

    let everywhere = Options {
        tcp: Some(Tcp::plain("0.0.0.0:0".parse().unwrap())),
        ..Options::default()
    };
    assert!(refusal(&everywhere).await.contains("no token file"));
    let no_token = Options {
        tcp: Some(Tcp::Plain {
            address: "0.0.0.0:0".parse().unwrap(),
            token_file: Some(directory.path().join("token")),
        }),
        ..everywhere
    };
    assert!(refusal(&no_token).await.contains("cannot be read"));
}

#[tokio::test]
async fn the_longest_possible_socket_path_works() {
    let directory = tempfile::tempdir().unwrap();
    let rest = 107 - directory.path().as_os_str().len() - 1;
    let path = directory.path().join("s".repeat(rest));
    Server::bind(&socket(&path)).await.unwrap();
}

#[tokio::test]
async fn without_a_token_tcp_answers_local_programs_but_no_web_page() {
    let server = Running::start(|options| options.tcp = Some(local())).await;
    let get = || Request::new("GET", "/v1/node");
    for host in ["localhost", "localhost:7000", "127.0.0.1", "[::1]:7000"] {
        assert_eq!(
            server.send_tcp(&get().host(host)).await.status,
            200,
            "{host}"
        );
    }
    for host in ["evil.example", "localhost.evil.example", "10.1.2.3"] {
        let reply = server.send_tcp(&get().host(host)).await;
        assert_eq!(
            (reply.status, &*reply.problem().reason),
            (403, "HostRefused"),
            "{host}"
        );
    }
    let doubled = get().header("Host", "evil.example");
    assert_eq!(server.send_tcp(&doubled).await.status, 400);
    let absolute = Request::new("GET", "http://evil.example/v1/node");
    assert_eq!(server.send_tcp(&absolute).await.status, 403);

    let forget = Request::new("POST", "/v1/leases/a/forget");
    let crossed = forget.clone().header("Origin", "http://evil.example");
    assert_eq!(
        server.send_tcp(&crossed).await.problem().reason,
        "OriginRefused"
    );
    let own = forget.header("Origin", "http://localhost");
    assert_eq!(server.send_tcp(&own).await.status, 204);
    server.stop().await;
}

#[tokio::test]
async fn with_a_token_tcp_wants_it() {
    let directory = tempfile::tempdir().unwrap();
    let token_file = directory.path().join("token");
    std::fs::write(&token_file, "0123456789abcdef\n").unwrap();
    let server = Running::start(|options| {
        options.tcp = Some(Tcp::Plain {
            address: "127.0.0.1:0".parse().unwrap(),
            token_file: Some(token_file),
        });
    })
    .await;
    let get = || Request::new("GET", "/v1/node").host("any.example");
    let reply = server.send_tcp(&get()).await;
    assert_eq!(
        (reply.status, &*reply.problem().reason),
        (401, "Unauthorized")
    );
    assert_eq!(
        reply.header("www-authenticate"),
        Some("Bearer realm=\"branchpool\"")
    );
    let wrong = get().header("Authorization", "Bearer 0123456789abcdee");
    assert_eq!(server.send_tcp(&wrong).await.status, 401);
    let right = get().header("Authorization", "Bearer 0123456789abcdef");
    assert_eq!(server.send_tcp(&right).await.status, 200);
    let health = Request::new("GET", "/healthz").host("10.1.2.3");
    assert_eq!(server.send_tcp(&health).await.status, 200);
    // The socket's mode decides there.
    assert_eq!(server.send(&get()).await.status, 200);
    server.stop().await;
}
