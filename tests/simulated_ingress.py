"""An ingress in the simulation: request machines, one stream per group, and a network in between that loses things."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Grant, Incarnation, LineNews
from cluster.requests.directory import Directory
from cluster.requests.machine import RequestMachine, moves
from tests.shadow import expected_logprobs
from workers.errors import CODE_NO_LEASE, EngineRefused
from workers.logprobs import TokenLogprobs
from workers.outbox import Message, Outbox
from workers.plan import Finish, GroupDead, TokenEvent

if TYPE_CHECKING:
    from tests.simulation import SimulatedGroup, World


POLL_S = 1.0
"""How long a poll for news waits where nobody wakes it."""


@dataclass(eq=False)
class Job:
    machine: RequestMachine
    expected: tuple[tuple[int, ...], Finish]
    output: list[int] = field(default_factory=list)
    told: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] | None = None
    ended: bool = False
    started_at: float = 0.0
    submitted: bool = False
    tried: set[Incarnation] = field(default_factory=set)
    alarm: float | None = None


class Stream:
    """The event stream from one incarnation of a group. Messages arrive in order; a break loses those on the way."""

    def __init__(self, ingress: SimulatedIngress, group: SimulatedGroup) -> None:
        self.ingress, self.group, self.world = ingress, group, ingress.world
        self.life = 0
        self.handled = 0
        self.lost = False
        self.next_arrival = 0.0
        self.outbox: Outbox = group.engine.subscribe(ingress.name, self._waker(0), self.world.now)
        self.world.after(0.5, self.renew)

    def _waker(self, life: int) -> Any:
        def wake() -> None:
            self.world.after(0.0005, lambda: self.pull(life))

        return wake

    def pull(self, life: int) -> None:
        """Group side: send what is unread; an outbox that is closed ends the stream."""
        if life != self.life or self.lost or self.ingress.dead:
            return
        message = self.outbox.read()
        if message is not None:
            self.next_arrival = max(self.next_arrival, self.world.now + self.world.delay())
            self.world.after(self.next_arrival - self.world.now, lambda: self.take(life, message))
        elif self.outbox.closed:
            self.world.after(max(0.001, self.next_arrival - self.world.now), lambda: self.reconnect(life))

    def take(self, life: int, message: Message) -> None:
        """Ingress side."""
        if life != self.life or self.lost or self.ingress.dead:
            return
        self.handled = message.number
        for event in message.events:
            self.ingress.feed_by_name(event.request, moves.Arrived(message.epoch, event))
        if self.outbox.closed:
            self._waker(life)()
        if self.world.chance.random() < 0.3 and not self.group.dead:
            number = self.handled
            engine = self.group.engine
            self.world.call(lambda: engine.ack(self.ingress.name, number), lambda _: None, lambda: None)

    def break_off(self) -> None:
        life = self.life
        self.world.after(self.world.chance.uniform(0.0, 0.3), lambda: self.reconnect(life))

    def reconnect(self, life: int) -> None:
        if life != self.life or self.lost or self.ingress.dead:
            return
        self.life += 1
        self.next_arrival = 0.0
        if self.group.dead:
            self.lose(gone=True)
            return
        try:
            waker = self._waker(self.life)
            self.outbox = self.group.engine.resubscribe(self.ingress.name, self.handled, waker, self.world.now)
        except EngineRefused:
            self.lose(gone=False)

    def renew(self) -> None:
        if self.lost or self.ingress.dead or self.group.dead:
            return
        engine = self.group.engine
        self.world.call(
            lambda: engine.renew(self.ingress.name, self.world.now),
            lambda alive: None if alive else self.lose(gone=False),
            lambda: None,
        )
        self.world.after(1.0, self.renew)

    def lose(self, gone: bool) -> None:
        if self.lost or self.ingress.dead:
            return
        self.lost = True
        self.ingress.drop_stream(self, gone)


class SimulatedIngress:
    """`acked` and `life` are those of the coordinator's last news; one ask for news is under way at a time."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.dead = False
        self.jobs: dict[str, Job] = {}
        self.streams: dict[str, Stream] = {}
        self.acked = 0
        self.life: int | None = None
        self.polling = False
        self.directory = Directory(None, lambda: world.now)  # type: ignore[arg-type]  # fed by learn_groups
        world.after(POLL_S, self.poll)

    # -- machines -----------------------------------------------------------------------------------------------------

    def start(self, machine: RequestMachine, expected: tuple[tuple[int, ...], Finish]) -> None:
        job = self.jobs[machine.work.id] = Job(machine, expected, started_at=self.world.now)
        self.feed(job, moves.Started())

    def leave(self, name: str) -> None:
        self.feed_by_name(name, moves.Cancelled())

    def feed_by_name(self, name: str, event: moves.Event) -> None:
        if name in self.jobs:
            self.feed(self.jobs[name], event)

    def feed(self, job: Job, event: moves.Event) -> None:
        if self.dead:
            return
        for action in job.machine.on_event(event, self.world.now):
            self.perform(job, action)

    def die(self) -> None:
        self.dead = True
        self.world.lost_with_ingress |= set(self.jobs)
        self.jobs.clear()

    def perform(self, job: Job, action: moves.Action) -> None:
        match action:
            case moves.Emit(event):
                self.show(job, event)
            case moves.End():
                self.end(job, action)
            case moves.Place():
                self.place(job, action)
            case moves.Leave(request, attempt):
                self.leave_line((request, attempt))
            case moves.Submit(grant, request):
                self.submit(job, grant, request)
            case moves.Abort(grant):
                self.abort(grant)
            case moves.Settle(outcome):
                self.close(outcome.grant, lambda c: c.settle([outcome], self.world.now))
            case moves.Withdraw(name):
                self.close(name, lambda c: c.withdraw([name], self.world.now))
            case moves.Wake(at):
                job.alarm = at
                if at is not None:
                    self.world.after(at - self.world.now, lambda: self.ring(job, at))

    def ring(self, job: Job, at: float) -> None:
        if job.alarm == at:
            self.feed(job, moves.Ticked())

    def show(self, job: Job, event: TokenEvent) -> None:
        assert not job.ended and event.index == len(job.output), f"seed {self.world.seed}: {job.machine.work.id}"
        job.output += event.tokens
        job.told += event.logprobs or ()
        if event.prompt is not None:
            assert job.scores is None, f"seed {self.world.seed}: {job.machine.work.id} is scored twice"
            job.scores = list(event.prompt)
        expected = job.expected[0][: len(job.output)]
        assert tuple(job.output) == expected, f"seed {self.world.seed}: {job.machine.work.id} got wrong tokens"

    def end(self, job: Job, end: moves.End) -> None:
        from tests.simulation import FINISHED, end_name

        name = job.machine.work.id
        assert name not in self.world.ends, f"seed {self.world.seed}: {name} ended twice"
        if end.event is not None:
            self.show(job, end.event)
        job.ended = True
        how = self.world.ends[name] = job.machine.fault or end_name(end)
        if how in FINISHED:
            assert (tuple(job.output), how) == (job.expected[0], job.expected[1].value), f"seed {self.world.seed}"
            self.check_logprobs(job)
        del self.jobs[name]

    def check_logprobs(self, job: Job) -> None:
        """Whatever groups died meanwhile: each token is told of once, and so is the prompt."""
        prompt, sampling = job.machine.work.prompt, job.machine.work.sampling
        told: list[TokenLogprobs] = []
        if sampling.logprobs is not None:
            told = expected_logprobs((*prompt, *job.output), sampling.logprobs)[len(prompt) - 1 :]
        scores = None
        if sampling.prompt_logprobs is not None:
            scores = expected_logprobs(prompt, sampling.prompt_logprobs)
        assert (job.told, job.scores) == (told, scores), f"seed {self.world.seed}: {job.machine.work.id}"

    # -- calls --------------------------------------------------------------------------------------------------------

    def place(self, job: Job, place: moves.Place) -> None:
        world, ask = self.world, place.ask

        def work(coordinator: Coordinator) -> object:
            (answer,) = coordinator.place(self.name, [ask], world.now)
            world.note_answer(answer)
            return answer

        def answer(placed: Any) -> None:
            job.tried.clear()
            self.feed(job, moves.Placed(placed))

        def lost() -> None:
            grant = self.directory.grant(ask, job.tried)
            if grant is not None:
                self.feed(job, moves.Placed(grant))
                return
            job.tried.clear()
            self.feed(job, moves.AskLost(ask.attempt))

        world.ask_coordinator(work, answer, lost)

    def learn_groups(self) -> None:
        """What the coordinator says of its groups now and then, for when it is away."""
        if self.world.coordinator_up:
            self.directory._states = self.world.coordinator.groups(self.world.now)
            self.directory._learned_at = self.world.now

    def leave_line(self, key: tuple[str, int]) -> None:
        self.insist(lambda coordinator: coordinator.leave_line([key], self.world.now), 5)

    def wake(self) -> None:
        """The coordinator has news: the poll that waits there comes back."""
        if not self.polling:
            self.world.after(0.0005, self.ask_news)

    def poll(self) -> None:
        if not self.dead:
            self.learn_groups()
            self.ask_news()
            self.world.after(POLL_S, self.poll)

    def ask_news(self) -> None:
        if self.polling or self.dead:
            return
        self.polling = True
        world, acked = self.world, self.acked
        world.ask_coordinator(lambda c: c.news(self.name, acked, world.now), self.take_news, self.lose_line)

    def take_news(self, news: LineNews) -> None:
        self.polling = False
        if self.dead:
            return
        if news.life != self.life:
            self.acked = 0
            self.lose_line()  # at the first life, too: tickets of one before may have been lost
        self.life = news.life
        for answer in news.answers:
            job = self.jobs.get(answer.request)
            if job is not None:
                self.feed(job, moves.Placed(answer))
            elif isinstance(answer, Grant):
                self.insist(lambda c, name=answer.id: c.withdraw([name], self.world.now), 5)
        self.acked = max(self.acked, news.number) if news.life == self.life else news.number

    def lose_line(self) -> None:
        self.polling = False
        for job in tuple(self.jobs.values()):
            self.feed(job, moves.LineLost())

    def close(self, grant: str, work: Any) -> None:
        self.world.invariants.note_closed(grant)
        self.insist(work, 5)

    def insist(self, work: Any, tries: int) -> None:
        if tries and not self.dead:
            self.world.ask_coordinator(work, lambda _: None, lambda: self.insist(work, tries - 1))

    def submit(self, job: Job, grant: Grant, request: Any) -> None:
        if not job.submitted:
            job.submitted = True
            self.world.waited[job.machine.work.priority].append(self.world.now - job.started_at)
        group = self.world.groups[grant.address]
        if group.dead:
            self.world.after(0.005, lambda: self.feed(job, moves.GroupLost(grant.group, grant.epoch, True)))
            return
        if grant.address not in self.streams:
            self.streams[grant.address] = Stream(self, group)

        def answer(result: object) -> None:
            if isinstance(result, EngineRefused):
                self.feed(job, moves.Rejected(request.attempt, result.code, result.message))
                if result.code == CODE_NO_LEASE and grant.address in self.streams:
                    self.streams[grant.address].lose(gone=False)
            elif isinstance(result, GroupDead):
                self.feed(job, moves.GroupLost(grant.group, grant.epoch, True))
            else:
                self.feed(job, moves.Submitted(request.attempt))

        def lost() -> None:
            self.feed(job, moves.SubmitLost(request.attempt))

        self.world.call(lambda: self.world.submit(group, self.name, request), answer, lost)

    def abort(self, grant: Grant) -> None:
        group = self.world.groups[grant.address]
        if group.dead:
            return

        def work() -> None:
            group.engine.abort(grant.request, grant.attempt)
            group.poke()

        self.world.call(work, lambda _: None, lambda: None)

    def drop_stream(self, stream: Stream, gone: bool) -> None:
        address = stream.group.address
        if self.streams.get(address) is stream:
            del self.streams[address]
        for job in tuple(self.jobs.values()):
            current = job.machine.current
            if current is not None and current.grant.address == address:
                self.feed(job, moves.GroupLost(current.grant.group, current.grant.epoch, gone))
