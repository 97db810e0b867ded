"""A step of known costs with a critic, beside the actor or on devices of its own, as its timeline."""

from verl_fuse.spec.timeline import Span, Timeline

PROMPT = 9
# Seconds of a decode step, alone and for each sequence.
STEP, SEQUENCE = 0.02, 0.0005
# Response tokens of a step with a few long samples, and of one without.
TAIL = [20] * 28 + [600] * 4
FLAT = [200] * 16 + [300] * 16


def requests(lengths, replica, step, sequence):
    """Request spans of a replica that runs all these samples at once."""
    now, done, spans = 0.0, 0, []
    for place, length in enumerate(sorted(lengths)):
        now += (length - done) * (step + sequence * (len(lengths) - place))
        done = length
        spans.append(
            Span(
                "request", f"replica {replica}", "generate", 1e-6 * place, now,
                {"prompt_tokens": PROMPT, "response_tokens": length},
            )
        )  # fmt: skip
    return spans


def placed_step(
    lengths,
    *,
    update,
    replicas=4,
    all_devices=4,
    critic=None,
    rest=2.0,
    values=1.0,
    step=STEP,
    sequence=SEQUENCE,
    number=2,
):
    """(timeline, lengths by data set) of a step whose critic works `update` and `values` seconds of one device, on all
    devices or on the range `critic`; nothing else takes but `rest` seconds."""
    ranks = critic or range(all_devices)
    spans = [span for r in range(replicas) for span in requests(lengths[r::replicas], r, step, sequence)]
    now = max(span.end for span in spans)
    spans.append(Span("gen", "step", "stage", 0.0, now))
    if critic:
        # The update of the step before, which began as this step did.
        spans.append(Span("update_critic", "lane critic", "train", 0.0, update / len(ranks)))
        waited = max(0.0, update / len(ranks) - now)
        spans.append(Span("wait_for_critic", "step", "stage", now, now + waited))
        now += waited
    lane = "critic" if critic else "train"
    for name, work, category in (("values", values, "inference"), ("update_critic", update, "train")):
        spans += [Span(name, f"rank {rank}", category, now, now + work / len(ranks)) for rank in ranks]
        if critic and name == "update_critic":
            continue
        spans += [Span(name, track, "stage", now, now + work / len(ranks)) for track in ("step", f"lane {lane}")]
        now += work / len(ranks)
    spans.append(Span("update_actor", "step", "stage", now, now + rest))
    return Timeline("run", number, 0.0, now + rest, tuple(spans)), {"math": [(PROMPT, length) for length in lengths]}
