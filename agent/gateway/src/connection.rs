//! One client's connection, from its first byte to its last.

use std::{future::poll_fn, net::IpAddr, sync::Arc};

use bytes::BytesMut;
use tokio::{io::AsyncWriteExt, net::TcpStream, sync::watch, time::timeout};

use crate::{
    attach::{self, Backend},
    branch::{Branch, Client, State},
    limits::{Stranger, Strangers},
    login::{self, Opening, Route, Shared, Stop},
    messages::Fatal,
    metrics::{Counted, Phase},
    relay::{End, Relay},
    startup::Startup,
    stream::{ClientStream, Wire},
};

/// Serves a client until it or its session ends.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    strangers: Strangers,
    socket: TcpStream,
    address: IpAddr,
    mut stopping: watch::Receiver<bool>,
) {
    let mut counted = shared.metrics.connection();
    // In a box, so that a connection does not keep what only its login needs.
    let login = Box::pin(log_in(&shared, &strangers, socket, address, &mut counted));
    let relay = tokio::select! {
        relay = login => relay,
        _ = stopping.wait_for(|stopping| *stopping) => None,
    };
    if let Some(relay) = relay {
        counted.enter(Phase::Open);
        run(&shared, relay, stopping).await;
    }
}

async fn log_in(
    shared: &Shared,
    strangers: &Strangers,
    socket: TcpStream,
    address: IpAddr,
    counted: &mut Counted,
) -> Option<(Relay, Arc<Branch>)> {
    let mut stranger = strangers.admit(address);
    let identify = timeout(shared.limits.startup_time, identify(shared, socket));
    let identified = tokio::select! {
        identified = identify => identified.ok().flatten(),
        () = stranger.evicted() => None,
    };
    let (mut wire, startup, route) = identified?;
    let branch = match &route {
        Route::Pool(branch) | Route::Other(branch, _) => Arc::clone(branch),
        Route::Unknown { .. } => return None,
    };
    let result = if let Route::Other(_, role) = &route {
        let target = (&branch, role.as_str());
        relayed(shared, &mut wire, &startup, target, (stranger, counted)).await
    } else {
        drop(stranger);
        checked(shared, &mut wire, &startup, &branch, counted).await
    };
    match result {
        Ok((backend, client)) => {
            let metrics = shared.metrics.clone();
            let relay = Relay::new(wire.stream, &wire.input, backend, client, metrics);
            Some((relay, branch))
        }
        Err(stop) => {
            tell(shared, wire, stop).await;
            None
        }
    }
}

/// Who the client is: proved, unless the branch has to check it. `None` when all is said.
async fn identify(shared: &Shared, socket: TcpStream) -> Option<(Wire, Startup, Route)> {
    match login::negotiate(shared, socket).await {
        Ok(Opening::Session(mut wire, startup)) => {
            let route = login::route(&shared.directory, &startup.user);
            if let Route::Other(..) = route {
                return Some((wire, startup, route));
            }
            match login::authenticate(shared, &mut wire, &startup, &route).await {
                Ok(()) => Some((wire, startup, route)),
                Err(stop) => {
                    tell(shared, wire, stop).await;
                    None
                }
            }
        }
        Ok(Opening::Cancel(request)) => {
            shared.directory.cancels().cancel(&request).await;
            None
        }
        Ok(Opening::Refused(wire, fatal)) => {
            tell(shared, wire, fatal.into()).await;
            None
        }
        Err(error) => {
            tracing::debug!(%error, "a connection ended before it said what it wants");
            None
        }
    }
}

type Attached = (Backend, Client);

/// A session for a client of the pool's role, whose password was right.
async fn checked(
    shared: &Shared,
    wire: &mut Wire,
    startup: &Startup,
    branch: &Arc<Branch>,
    counted: &mut Counted,
) -> Result<Attached, Stop> {
    let client = branch.client();
    let attach = async {
        attach::wake(shared, branch, counted).await?;
        let attach = attach::attach(shared, wire, startup, branch);
        timeout(shared.limits.backend_time, attach)
            .await
            .map_err(|_| attach::slow_server())?
    };
    let backend = tokio::select! {
        backend = attach => backend?,
        () = branch.ended() => return Err(Fatal::terminated().into()),
    };
    let facts = branch.facts();
    if crate::takeover::is_pools(startup, &facts.database) {
        shared.directory.learn(&facts.pool, startup);
    }
    Ok((backend, client))
}

/// A session for a client of another role.
async fn relayed(
    shared: &Shared,
    wire: &mut Wire,
    startup: &Startup,
    target: (&Arc<Branch>, &str),
    (mut stranger, counted): (Stranger, &mut Counted),
) -> Result<Attached, Stop> {
    let branch = target.0;
    let proof = async {
        attach::wake(shared, branch, counted).await?;
        attach::relay_proof(shared, wire, startup, target).await
    };
    let proved = tokio::select! {
        proved = proof => proved?,
        () = branch.ended() => return Err(Fatal::denied(&startup.user).into()),
        () = stranger.evicted() => return Err(Stop::Told),
    };
    drop(stranger);
    let client = branch.client();
    let backend = tokio::select! {
        backend = proved.finish(shared, wire, startup) => backend?,
        () = branch.ended() => return Err(Fatal::terminated().into()),
    };
    Ok((backend, client))
}

/// Says why it goes no further, and closes.
async fn tell(shared: &Shared, mut wire: Wire, stop: Stop) {
    match stop {
        Stop::Gone { source } => tracing::debug!(error = %source, "a client left at its login"),
        Stop::Told => say(shared, &mut wire.stream, BytesMut::new()).await,
        Stop::Refused { fatal } => {
            fatal.put(&mut wire.output);
            say(shared, &mut wire.stream, wire.output).await;
        }
    }
}

/// Moves bytes until somebody ends it, and says why to who is left.
async fn run(
    shared: &Shared,
    (mut relay, branch): (Relay, Arc<Branch>),
    mut stopping: watch::Receiver<bool>,
) {
    let end = tokio::select! {
        biased;
        end = poll_fn(|cx| relay.poll(cx)) => Some(end),
        () = branch.ended() => None,
        _ = stopping.wait_for(|stopping| *stopping) => None,
    };
    let (mut client, mut rest, speak) = relay.close();
    if end == Some(End::Client) {
        return;
    }
    if speak {
        let fatal = if end.is_none() || branch.state() == State::Ended {
            Fatal::terminated()
        } else {
            Fatal::new("57P02", "the branch's server has ended")
                .hint("It is being started again: connect again.")
        };
        fatal.put(&mut rest);
    }
    say(shared, &mut client, rest).await;
}

/// Last words: a client that does not listen is not waited for.
async fn say(shared: &Shared, client: &mut ClientStream, mut words: BytesMut) {
    let said = async {
        client.write_all_buf(&mut words).await?;
        client.shutdown().await
    };
    let _ = timeout(shared.limits.goodbye_time, said).await;
}
