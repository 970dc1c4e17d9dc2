"""The loop. `train` is the door; `Trainer.run` is the page to read."""

import copy
import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from proximetry import metrics
from proximetry.cuda.fused import fuse
from proximetry.models import Embedder
from proximetry.models.narrowing import moments, narrow, narrowed, principal_axes
from proximetry.training.checkpoint import load_checkpoint, save_checkpoint
from proximetry.training.display import Display
from proximetry.training.folder import RunError, RunFolder
from proximetry.training.material import Material, questions
from proximetry.training.network import CapturedInference, CapturedNetwork, PixelNetwork
from proximetry.training.objective import Objective
from proximetry.training.parts import make_embedder, make_optimizer
from proximetry.training.recipe import Recipe
from proximetry.training.schedule import LearningRates
from proximetry.training.seeds import derive
from proximetry.training.stopping import Stopped, StopSignal
from proximetry.training.tracking import Trackers
from proximetry.training.world import World, add_up, average_gradients, gather, of_first


class Trainer:
    """One run: everything it holds, and how it goes on."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, world: World, resume: bool, display: Display
    ) -> None:
        self.started = time.monotonic()
        self.recipe, self.folder, self.world, self.display = recipe, folder, world, display
        continues = world.first(lambda: folder.open(recipe, resume))
        torch.manual_seed(recipe.training.seed)
        self.embedder = make_embedder(recipe.model).to(world.device)
        if world.device.type == "cuda":
            # No slower here, and the same in every run.
            torch.backends.cudnn.deterministic = True
            self.embedder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Parts of a batch would share one graph, and with it one place for their embeddings.
        alone = world.device.type == "cuda" and world.size == recipe.training.accumulate == 1
        self.captures = recipe.training.capture and alone
        if self.captures:
            fuse(self.embedder)
        self.material = Material(recipe, self.embedder.preprocessing, world, display)
        names = self.material.class_names
        widths = self.embedder.dim, self.embedder.width
        self.objective = Objective(recipe.loss, names, *widths).to(world.device)
        self.average = copy.deepcopy(self.embedder) if recipe.training.ema else None
        self.optimizer = make_optimizer(recipe, self.embedder, self.objective)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.rates = LearningRates(recipe.schedule, recipe.training.epochs, rates)
        self.scaler = torch.amp.GradScaler(
            world.device.type, enabled=recipe.training.precision == "float16"
        )
        self.epoch = self.batch = self.step_number = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
        self.bad_step = torch.full((), -1, dtype=torch.long, device=world.device)
        self.selected: dict[str, Any] = {"epoch": None, "value": None, "since": 0}
        # Seconds of training, and of what came before: data, weights, compiling, recording.
        self.seconds = self.startup = 0.0
        self.trackers = Trackers(recipe, folder.path) if world.leads else None
        if continues:
            self.restore()
        precision = recipe.training.precision
        extras = recipe.model.dropout, bool(recipe.loss.companions)
        self.plain = PixelNetwork(self.embedder, precision, world.device, *extras)
        self.network: nn.Module = self.plain
        judged = PixelNetwork(self.evaluated(), precision, world.device)
        self.inference = CapturedInference(judged) if self.captures else judged
        # With the present weights: what was evaluated, and the axes that are kept.
        self.found: dict[str, dict[str, float]] = {}
        self.axes: Tensor | None = None
        self.warm = False
        self.thawed: bool | None = None  # whether the backbone is trained; None before the start

    def run(self) -> dict[str, Any]:
        """Train to the end, or to where a signal stops it, and return the results."""
        steps = len(self.material.sampler)
        self.display.start(self.recipe.training.epochs, steps)
        with StopSignal() as stop:
            while not self.is_over():
                self.begin_epoch()
                seen = 0
                for pixels, labels in self.material.batches(self.epoch, self.batch):
                    loss = self.step(pixels, labels)
                    self.batch += 1
                    self.step_number += 1
                    seen += len(labels) * self.world.size if self.warm else 0
                    self.settle()
                    speed = seen / max(time.monotonic() - self.started, 1e-9)
                    self.display.step(self.epoch, self.batch, self._shown(loss), speed)
                    if self.agree_to_stop(stop):
                        self.check_finite()  # which waits for the device
                        self.seconds += time.monotonic() - self.started
                        self.save(self.folder.last)
                        raise Stopped(self.step_number, self.folder.path)
                    every = self.recipe.training.checkpoint_steps
                    if every and self.step_number % every == 0 and self.batch < steps:
                        self.save(self.folder.last)
                self.end_epoch(seen)
        return self.finish()

    def begin_epoch(self) -> None:
        """Set the learning rates; freeze or thaw the backbone where that changes."""
        if self.warm:
            self.started = time.monotonic()
        self.found, self.axes = {}, None
        self.rates.apply(self.optimizer, self.epoch)
        self.embedder.train()
        self.objective.train()
        thawed = self.epoch >= self.recipe.schedule.warmup_epochs
        if thawed != self.thawed:
            self.thawed = thawed
            self.wrap()

    def wrap(self) -> None:
        """Compile and distribute the network anew: both note which parameters are trained."""
        for parameter in self.embedder.parameter_parts()["backbone"]:
            parameter.requires_grad_(bool(self.thawed))
        network: nn.Module = CapturedNetwork(self.plain) if self.captures else self.plain
        if self.recipe.training.compile:
            network = torch.compile(network)  # type: ignore[assignment]
        if self.world.size > 1:
            network = DistributedDataParallel(network)
        self.network = network
        self.warm = False

    def settle(self) -> None:
        """After the first step of a network, when all is compiled: training time begins here."""
        if self.warm:
            return
        self.check_finite()  # which waits for the device
        now = time.monotonic()
        self.startup += now - self.started
        self.started, self.warm = now, True

    def step(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """One update; the loss is that of the whole batch over all processes."""
        # Every step has a seed of its own, so a continued run draws what the first would have.
        torch.manual_seed(derive(self.recipe.training.seed, self.step_number, self.world.rank))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward(pixels, labels)
        self.scaler.unscale_(self.optimizer)
        average_gradients(self.objective.parameters(), self.world)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.objective.after_step()
        self.update_average()
        self.loss_sum += loss
        first_bad = (self.bad_step < 0) & ~torch.isfinite(loss)
        self.bad_step = torch.where(first_bad, self.step_number, self.bad_step)
        if self.world.device.type == "cpu":
            self.check_finite()
        return loss

    def backward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Fill in the gradients and return the loss.

        With `accumulate` the batch goes through the network in parts, twice: once for the
        embeddings, from which loss and gradient of the whole batch follow, and once to carry the
        gradient back. The result is that of the whole batch, in the memory of a part.
        """
        parts = self.recipe.training.accumulate
        everyone = gather(labels, self.world)
        if parts == 1:
            embeddings = self.embed(pixels)
            loss: Tensor = self.objective(gather(embeddings, self.world), everyone)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            return loss.detach().double()
        chunks = [chunk for chunk in pixels.chunk(parts) if len(chunk)]
        with torch.no_grad():
            found = [self.embed(chunk, part) for part, chunk in enumerate(chunks)]
        embeddings = torch.cat(found).requires_grad_()
        loss = self.objective(gather(embeddings, self.world), everyone)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        assert embeddings.grad is not None
        start = 0
        for part, chunk in enumerate(chunks):
            gradient = embeddings.grad[start : start + len(chunk)]
            self.embed(chunk, part).backward(gradient)  # type: ignore[no-untyped-call]
            start += len(chunk)
        return loss.detach().double()

    def embed(self, pixels: Tensor, part: int | None = None) -> Tensor:
        """Pixels 0…255 to embeddings, in the precision of the recipe."""
        if part is not None:  # both passes over a part must drop the same units
            seed, rank = self.recipe.training.seed, self.world.rank
            torch.manual_seed(derive(seed, self.step_number, rank, part))
        embeddings: Tensor = self.network(pixels)
        return embeddings

    def clip(self) -> None:
        """Clip gradients as the recipe says: values of all, the norm of the model's."""
        o = self.recipe.optimizer
        if o.clip_value is not None:
            everything = [*self.embedder.parameters(), *self.objective.parameters()]
            nn.utils.clip_grad_value_(everything, o.clip_value)
        if o.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.embedder.parameters(), o.clip_norm)

    @torch.no_grad()
    def update_average(self) -> None:
        """Let the moving average follow; it starts quickly, as a plain mean would."""
        if self.average is None:
            return
        decay = min(self.recipe.training.ema, (1 + self.step_number) / (10 + self.step_number))
        slow: list[Tensor] = list(self.average.parameters())
        fast: list[Tensor] = list(self.embedder.parameters())
        torch._foreach_lerp_(slow, fast, 1 - decay)
        for kept, new in zip(self.average.buffers(), self.embedder.buffers(), strict=True):
            kept.copy_(new)

    def end_epoch(self, seen: int) -> None:
        """Evaluate, choose, write down, save."""
        self.check_finite()  # which waits for the device
        elapsed = max(time.monotonic() - self.started, 1e-9)
        self.seconds += elapsed
        self.epoch += 1
        self.batch = 0
        line: dict[str, Any] = {
            "epoch": self.epoch,
            "step": self.step_number,
            "loss": self.loss_sum.item() / len(self.material.sampler),
            "lr": self.optimizer.param_groups[0]["lr"],
            "images_per_second": round(seen / elapsed, 1),
            "seconds": round(self.seconds, 3),
        }
        self.loss_sum.zero_()
        self.watch(line)
        if self.world.leads:
            self.folder.log(line)
            if self.trackers is not None:
                self.trackers.log(line)
        self.display.epoch(line)
        if self.epoch % self.recipe.training.checkpoint_epochs == 0 or self.is_over():
            self.save(self.folder.last)
        keep = self.recipe.training.keep_every
        if keep and self.epoch % keep == 0:
            self.save(self.folder.of_epoch(self.epoch))

    def watch(self, line: dict[str, Any]) -> None:
        """Evaluate where it is due; add what was found, and the time it took, to the line."""
        e = self.recipe.evaluation
        if self.epoch % e.every and self.epoch != self.recipe.training.epochs:
            return
        started = time.monotonic()
        if e.protocol != "last":
            name = "test" if e.protocol == "paper" else "held_out"
            self.found[name] = self.evaluate(name)
            self.choose(self.found[name][e.metric])
        if e.watch_test and "test" not in self.found and len(self.material.rows["test"]):
            self.found["test"] = self.evaluate("test")
        if self.found:
            line |= self.found
            line["evaluation_seconds"] = round(time.monotonic() - started, 3)

    def choose(self, value: float) -> None:
        """Keep this epoch if it is the best so far."""
        self.rates.observe(value, self.epoch - 1)
        if self.selected["value"] is None or value > self.selected["value"]:
            self.selected = {"epoch": self.epoch, "value": value, "since": 0}
            self.save(self.folder.best)
        else:
            self.selected["since"] += 1

    def is_over(self) -> bool:
        """Whether all epochs are done, or the selection metric has stood still for too long."""
        limit = self.recipe.training.stop_after
        stale = limit > 0 and self.selected["since"] >= limit
        return stale or self.epoch >= self.recipe.training.epochs

    def finish(self) -> dict[str, Any]:
        """Judge the last and the chosen epoch, save the embedder, write the results."""
        results: dict[str, Any] = {
            "protocol": self.recipe.evaluation.protocol,
            "seed": self.recipe.training.seed,
            "epochs": self.epoch,
            "falls": self.rates.falls,
            "weights": self.embedder.weights.to_json(),
            "notes": list(self.material.notes),
            "seconds": round(self.seconds, 3),
            "startup_seconds": round(self.startup, 3),
            "last": {"epoch": self.epoch, **self.judge()},
        }
        results["chosen"] = results["last"]
        if self.selected["epoch"] not in (None, self.epoch):
            self.world.wait()
            load_checkpoint(self.folder.best, self.modules())
            self.found, self.axes = {}, None
            results["chosen"] = {"epoch": self.selected["epoch"], **self.judge()}
        embedder = self.kept()
        if self.world.leads:
            embedder.save(
                self.folder.embedder,
                class_names=self.material.class_names,
                metrics={"protocol": results["protocol"], **results["chosen"]},
                recipe=self.recipe.to_dict(),
            )
            self.folder.write_results(results)
            if self.trackers is not None:
                self.trackers.close()
        self.world.wait()
        return self.folder.read_results()

    def judge(self) -> dict[str, Any]:
        """All there is to evaluate on, with the present weights."""
        names = [name for name in ("held_out", "test") if len(self.material.rows[name])]
        return {name: self.found.get(name) or self.evaluate(name) for name in names}

    def evaluated(self) -> Embedder:
        """The weights that are judged and kept: the moving average, where there is one."""
        return self.embedder if self.average is None else self.average

    def kept(self) -> Embedder:
        """The embedder as it is saved: with as many numbers as the recipe keeps."""
        axes = self.kept_axes()
        return self.evaluated() if axes is None else narrowed(self.evaluated(), axes)

    def kept_axes(self) -> Tensor | None:
        """The axes along which the training images vary most, where not all numbers are kept."""
        keep = self.recipe.model.keep
        if self.axes is None and keep is not None:
            parts = map(moments, self.embedded(self.mine("fit")))
            summed = reduce(torch.add, parts)
            # Distances between vectors of unit length are angles too.
            e, m = self.recipe.evaluation, self.recipe.model
            about_mean = e.similarity == "euclidean" and not m.normalize
            axes = principal_axes(add_up(summed, self.world), keep, about_mean)
            self.axes = of_first(axes, self.world)
        return self.axes

    def mine(self, name: str) -> npt.NDArray[np.int64]:
        """The rows of a part of the data that fall to this process."""
        return self.material.rows[name][self.world.rank :: self.world.size]

    def evaluate(self, name: str) -> dict[str, float]:
        """Metrics on the held-out classes or on the test set, spread over the processes."""
        rows, e = self.mine(name), self.recipe.evaluation
        part, vectors = self.material.catalog.subset(rows), self.embeddings(rows)
        found: dict[str, float] = {}
        for cut in (None, *e.cuts):
            one = metrics.evaluate(
                **questions(part, vectors[:, :cut]),
                recall_at=e.recall_at,
                ndcg_at=e.ndcg_at,
                metric=e.similarity,
                group=dist.group.WORLD if self.world.size > 1 else None,
            )
            if cut:  # as many are asked as before
                one = {f"{k}[:{cut}]": v for k, v in one.items() if not k.startswith("queries")}
            found |= one
        return found

    def embeddings(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Embeddings of rows of the catalogue, as the saved embedder gives them."""
        axes = self.kept_axes()
        vectors = torch.cat([*self.embedded(rows)])
        return vectors if axes is None else narrow(vectors, axes, self.recipe.model.normalize)

    @torch.no_grad()
    def embedded(self, rows: npt.NDArray[np.int64]) -> Iterator[Tensor]:
        """Embeddings of rows of the catalogue, with all the numbers that are trained, in parts."""
        model, left = self.evaluated(), len(rows)
        model.eval()
        yield torch.empty(0, model.dim, device=self.world.device)  # there may be no rows
        for pixels in self.material.views(rows, self.recipe.evaluation.batch_size):
            vectors = self.inference(pixels)[:left]  # the last part may be filled up
            left -= len(vectors)
            yield vectors
        model.train()

    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds besides the optimiser."""
        parts: dict[str, nn.Module] = {"embedder": self.embedder, "loss": self.objective}
        return parts if self.average is None else {**parts, "average": self.average}

    def save(self, path: Path) -> None:
        """Write a checkpoint; only of a healthy state."""
        self.check_finite()
        if self.world.leads:
            state = {
                "epoch": self.epoch,
                "batch": self.batch,
                "step": self.step_number,
                "loss_sum": self.loss_sum.item(),
                "rates": self.rates.state_dict(),
                "selected": self.selected,
                "seconds": self.seconds,
                "startup": self.startup,
                "scaler": self.scaler.state_dict(),
                "sampler": self.material.sampler.state_dict(),
            }
            save_checkpoint(path, self.modules(), self.optimizer, state)

    def restore(self) -> None:
        """Continue from the newest checkpoint."""
        state = load_checkpoint(self.folder.last, self.modules(), self.optimizer)
        self.material.sampler.load_state_dict(state["sampler"])
        self.epoch, self.batch, self.step_number = state["epoch"], state["batch"], state["step"]
        self.loss_sum.fill_(state["loss_sum"])
        self.rates.load_state_dict(state["rates"])
        self.selected = state["selected"]
        self.seconds, self.startup = state["seconds"], state["startup"]
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.world.leads:
            self.folder.forget_after(self.epoch)
        self.display.message(f"continuing after step {self.step_number} (epoch {self.epoch})")

    def check_finite(self) -> None:
        """Stop if the loss was not finite, naming the step and its images."""
        step = int(self.bad_step)
        if step < 0:
            return
        per_epoch = len(self.material.sampler)
        indices = self.material.sampler.batch(step // per_epoch, step % per_epoch)
        files = [self.material.file(i) for i in indices[:5]]
        raise RunError(
            f"the loss was not finite at step {step} (epoch {step // per_epoch + 1}); its "
            f"{len(indices)} images begin with {', '.join(files)}. The last good checkpoint is "
            f"{self.folder.last}. A smaller learning rate, clipping or float32 usually helps"
        )

    def agree_to_stop(self, stop: StopSignal) -> bool:
        """Whether any process was asked to stop; all leave after the same step."""
        if self.world.size == 1:
            return stop.asked
        flag = torch.tensor(int(stop.asked), device=self.world.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _shown(self, loss: Tensor) -> float | None:
        """The loss for the display; reading it from a GPU waits, so not at every step."""
        if self.world.device.type == "cpu" or self.step_number % 20 == 0:
            return loss.item()
        return None
