//! The loop around the core: events in, actions out. It alone touches the [`Node`].

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot, watch},
    task::yield_now,
    time::{Instant, sleep_until},
};
use tracing::{info, warn};

use super::{committer::Reply, desired::Settings, perform, publish::Publisher, world::World};
use crate::plan::{Action, Command, Effects, Event, Node, Refusal, Token};

/// Most events taken in before what they led to is published.
const BATCH: usize = 256;

/// A command and who asks for it.
#[derive(Debug)]
pub(super) struct Envelope {
    pub(super) command: Command,
    /// Of an `Apply`.
    pub(super) settings: Option<Arc<Settings>>,
    pub(super) reply: Reply,
}

pub(super) struct Actor {
    node: Node,
    world: Arc<World>,
    publisher: Publisher,
    commands: mpsc::Receiver<Envelope>,
    events: mpsc::Receiver<Event>,
    replies: HashMap<Token, Reply>,
    next_token: u64,
    drained: watch::Sender<bool>,
}

impl std::fmt::Debug for Actor {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Actor").finish_non_exhaustive()
    }
}

impl Actor {
    pub(super) fn new(
        node: Node,
        world: Arc<World>,
        publisher: Publisher,
        commands: mpsc::Receiver<Envelope>,
        events: mpsc::Receiver<Event>,
        drained: watch::Sender<bool>,
    ) -> Self {
        let replies = HashMap::new();
        Self {
            node,
            world,
            publisher,
            commands,
            events,
            replies,
            next_token: 0,
            drained,
        }
    }

    /// Runs until the last handle is dropped.
    pub(super) async fn run(mut self, first: Effects) {
        self.carry_out(first);
        self.publish();
        let mut commands = Vec::with_capacity(BATCH);
        let mut events = Vec::with_capacity(BATCH);
        loop {
            let deadline = self.wake_at();
            tokio::select! {
                count = self.commands.recv_many(&mut commands, BATCH) => if count == 0 { return },
                _ = self.events.recv_many(&mut events, BATCH) => {}
                () = sleep_until(deadline) => events.push(Event::Tick),
            }
            // Whoever else is about to ask goes first: many at once become one transaction and one
            // publication.
            yield_now().await;
            // Some of the other kind as well: a flood of one must not starve the other.
            while commands.len() < BATCH
                && let Ok(envelope) = self.commands.try_recv()
            {
                commands.push(envelope);
            }
            while events.len() < BATCH
                && let Ok(event) = self.events.try_recv()
            {
                events.push(event);
            }
            for envelope in commands.drain(..) {
                self.take_command(envelope);
            }
            for event in events.drain(..) {
                self.take(event);
            }
            self.publish();
        }
    }

    fn publish(&mut self) {
        // Goes on meanwhile; nobody is answered before both are done.
        self.world.committer.flush();
        self.publisher.publish(&self.node, &self.world);
        self.world.committer.note_published();
    }

    fn wake_at(&self) -> Instant {
        let deadline = self.node.deadline(self.world.clock.now());
        // A far deadline stands for none.
        let wait = deadline.map_or(Duration::from_secs(3_600), |mono| {
            self.world.clock.until(mono)
        });
        // Timers count whole milliseconds; the core must not be asked a moment too early.
        Instant::now() + wait + Duration::from_millis(1)
    }

    fn take_command(&mut self, envelope: Envelope) {
        self.next_token += 1;
        let token = Token(self.next_token);
        self.replies.insert(token, envelope.reply);
        let applied = match &envelope.command {
            Command::Apply { spec, .. } => Some(spec.uid.clone()),
            _ => None,
        };
        let event = Event::Command(token, envelope.command);
        let effects = self.node.handle(event, self.world.clock.now());
        if let (Some(uid), Some(settings)) = (applied, envelope.settings)
            && !effects.refuses(token)
        {
            // Before what follows is carried out, which needs them.
            self.world.set_settings(uid, settings);
        }
        self.carry_out(effects);
    }

    fn take(&mut self, event: Event) {
        let effects = self.node.handle(event, self.world.clock.now());
        self.carry_out(effects);
    }

    fn carry_out(&mut self, effects: Effects) {
        for warning in &effects.warnings {
            warn!("{warning}");
        }
        self.publisher.note(&effects);
        for action in effects.actions {
            self.start(action);
        }
    }

    fn start(&mut self, action: Action) {
        match action {
            Action::Journal {
                entries,
                links,
                reply,
            } => {
                let reply = reply.and_then(|(token, answer)| {
                    self.replies.remove(&token).map(|reply| (reply, answer))
                });
                self.world.committer.submit(entries, links, reply);
            }
            Action::Reply { token, answer } => {
                if let Some(reply) = self.replies.remove(&token) {
                    note_refusal(&self.world, &answer);
                    let _caller_is_gone = reply.send(answer);
                }
            }
            Action::CancelBuild { pool, .. } => self.world.cancel_build(&pool),
            Action::Drained => {
                info!("the agent is drained");
                self.drained.send_replace(true);
            }
            action => perform::spawn(&self.node, &self.world, action),
        }
    }
}

fn note_refusal(world: &World, answer: &Result<Box<crate::plan::Answer>, Refusal>) {
    if let Err(refusal) = answer {
        world.metrics.refused(refusal);
    }
}

/// A way to ask, for as long as the actor runs.
pub(super) async fn ask(
    commands: &mpsc::Sender<Envelope>,
    command: Command,
    settings: Option<Arc<Settings>>,
) -> Option<Result<Box<crate::plan::Answer>, Refusal>> {
    let (reply, answer) = oneshot::channel();
    commands
        .send(Envelope {
            command,
            settings,
            reply,
        })
        .await
        .ok()?;
    answer.await.ok()
}
