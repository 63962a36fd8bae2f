//! A client that sends what libpq sends, keeps nothing between connections, and says what the time
//! of a connection goes to.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use fallible_iterator::FallibleIterator as _;
use postgres_protocol::{
    authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256},
    message::{backend::Message, frontend},
};
use snafu::{ResultExt, whatever};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use crate::error::Result;

/// For one message of a server.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where a client connects to on the loopback interface, and as whom.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) port: u16,
    pub(crate) user: String,
    pub(crate) password: String,
    pub(crate) database: String,
}

/// What logging in took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Login {
    /// From the server's wish for a proof until it has accepted that.
    pub(crate) handshake: Duration,
    /// Of that, what the client computed: 4,096 rounds of SHA-256.
    pub(crate) client_hash: Duration,
}

/// A proof that the server has not answered yet.
struct Proof {
    scram: ScramSha256,
    asked: Instant,
    client_hash: Duration,
}

#[derive(Debug)]
pub(crate) struct Session {
    stream: TcpStream,
    buffer: BytesMut,
    /// The end of the last answer has not been read.
    busy: bool,
}

impl Session {
    /// Without TLS, with SCRAM; anything else is an error.
    pub(crate) async fn open(target: &Target) -> Result<(Self, Login)> {
        let mut session = Self::connect(target.port).await?;
        let login = session.log_in(target).await?;
        session.wait_ready().await?;
        Ok((session, login))
    }

    /// How long it takes to be refused for a user or a password, the client's own computing left
    /// out; anything but that refusal is an error.
    pub(crate) async fn refused(target: &Target) -> Result<Duration> {
        let started = Instant::now();
        let mut session = Self::connect(target.port).await?;
        let proof = session.prove(target).await?;
        match session.next().await {
            Err(error) if error.to_string().contains("28P01") => {
                Ok(started.elapsed().saturating_sub(proof.client_hash))
            }
            Err(error) => Err(error),
            Ok(_) => whatever!("{} was let in, who was to be refused", target.user),
        }
    }

    async fn connect(port: u16) -> Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await;
        let stream = stream.with_whatever_context(|_| format!("nobody at port {port}"))?;
        stream
            .set_nodelay(true)
            .whatever_context("no TCP_NODELAY")?;
        Ok(Self {
            stream,
            buffer: BytesMut::with_capacity(4096),
            busy: true,
        })
    }

    async fn wait_ready(&mut self) -> Result<()> {
        while self.busy {
            self.busy = !matches!(self.next().await?, Message::ReadyForQuery(_));
        }
        Ok(())
    }

    async fn log_in(&mut self, target: &Target) -> Result<Login> {
        let mut sent = self.prove(target).await?;
        let Message::AuthenticationSaslFinal(proof) = self.next().await? else {
            whatever!("the server sends no proof")
        };
        sent.scram
            .finish(proof.data())
            .whatever_context("the server does not know the password")?;
        let Message::AuthenticationOk = self.next().await? else {
            whatever!("the server does not end the handshake")
        };
        Ok(Login {
            handshake: sent.asked.elapsed(),
            client_hash: sent.client_hash,
        })
    }

    /// Up to the client's proof.
    async fn prove(&mut self, target: &Target) -> Result<Proof> {
        let parameters = [
            ("user", target.user.as_str()),
            ("database", target.database.as_str()),
        ];
        self.send(|message| frontend::startup_message(parameters, message))
            .await?;
        let Message::AuthenticationSasl(_) = self.next().await? else {
            whatever!("the server does not ask for a SCRAM proof")
        };
        let asked = Instant::now();
        let mut scram = ScramSha256::new(target.password.as_bytes(), ChannelBinding::unsupported());
        self.send(|message| {
            frontend::sasl_initial_response(SCRAM_SHA_256, scram.message(), message)
        })
        .await?;
        let Message::AuthenticationSaslContinue(challenge) = self.next().await? else {
            whatever!("the server sends no challenge")
        };
        let began = Instant::now();
        scram
            .update(challenge.data())
            .whatever_context("the server's challenge is not SCRAM's")?;
        let client_hash = began.elapsed();
        self.send(|message| frontend::sasl_response(scram.message(), message))
            .await?;
        Ok(Proof {
            scram,
            asked,
            client_hash,
        })
    }

    /// Returns with the first column of the first row; what follows the row is read by the next
    /// call.
    pub(crate) async fn first_row(&mut self, sql: &str) -> Result<String> {
        self.wait_ready().await?;
        self.send(|message| frontend::query(sql, message)).await?;
        self.busy = true;
        loop {
            match self.next().await? {
                Message::DataRow(row) => {
                    let column = row
                        .ranges()
                        .next()
                        .whatever_context("a row cannot be read")?;
                    let bytes = column
                        .flatten()
                        .and_then(|range| row.buffer().get(range))
                        .unwrap_or_default();
                    return Ok(String::from_utf8_lossy(bytes).into_owned());
                }
                Message::CommandComplete(_) => whatever!("{sql} has no rows"),
                _ => {}
            }
        }
    }

    async fn send(
        &mut self,
        write: impl FnOnce(&mut BytesMut) -> std::io::Result<()>,
    ) -> Result<()> {
        let mut message = BytesMut::new();
        write(&mut message).whatever_context("a message cannot be made")?;
        let sent = self.stream.write_all(&message).await;
        sent.whatever_context("cannot send to the server")
    }

    async fn next(&mut self) -> Result<Message> {
        loop {
            let message = Message::parse(&mut self.buffer);
            match message.whatever_context("the server does not speak Postgres")? {
                Some(Message::ErrorResponse(body)) => {
                    let texts = body
                        .fields()
                        .map(|field| Ok(String::from_utf8_lossy(field.value_bytes()).into_owned()));
                    let texts: Vec<String> = texts.collect().unwrap_or_default();
                    whatever!("the server answers: {}", texts.join(" "));
                }
                Some(message) => return Ok(message),
                None => {}
            }
            let read = timeout(PATIENCE, self.stream.read_buf(&mut self.buffer))
                .await
                .whatever_context("the server does not answer")?
                .whatever_context("cannot read from the server")?;
            if read == 0 {
                whatever!("the server hung up");
            }
        }
    }
}
