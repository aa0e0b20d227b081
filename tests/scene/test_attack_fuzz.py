import os
import numpy as np
import pytest
import torch
from rooftop.scene import Camera, Renderer, Scene
from rooftop.scene.gbuffers import OUTPUTS
from rooftop.scene.rendering import memory
from rooftop.scene.rendering.memory import ROOM

ALL = tuple(OUTPUTS)
TIGHT = dict.fromkeys(ROOM, 2)


def diff(a, b, names):
    out = []
    for n in names:
        x, y = a[n], b[n]
        if not torch.equal(x.nan_to_num(-7.0), y.nan_to_num(-7.0)):
            out.append((n, int((x.nan_to_num(-7.0) != y.nan_to_num(-7.0)).sum()), x.shape))
    return out


def random_camera(r, w, h):
    eye, target = r.uniform(-9, 9, 3), r.uniform(-3, 3, 3)
    up = r.normal(size=3)
    kind = r.integers(4)
    near = float(10.0 ** r.uniform(-4, 0.5))
    if kind == 0:
        return Camera.parallel(eye, target, up, float(10.0 ** r.uniform(-1, 2)), w, h, near)
    if kind == 1:
        pose = Camera.look_at(eye, target, up).world_to_camera
        f = 10.0 ** r.uniform(-1, 3.5, 2)
        return Camera.from_intrinsics([[f[0], 0, r.uniform(-2 * w, 3 * w)], [0, f[1], r.uniform(-2 * h, 3 * h)], [0, 0, 1]], pose, w, h, near)
    return Camera.look_at(eye, target, up, float(r.uniform(1, 170)), w, h, near)


def nudged(r, c):
    m = c.world_to_camera.copy()
    m[:3, 3] += r.normal(0, 0.2, 3)
    return Camera(m, c.width, c.height, c.fx, c.fy, c.cx, c.cy, c.near, c.orthographic)


def matrix(r):
    while True:
        m = np.eye(4)
        m[:3, 3] = r.uniform(-6, 6, 3)
        m[:3, :3] = r.normal(size=(3, 3)) @ np.diag(10.0 ** r.uniform(-1, 0.3, 3)) * 10.0 ** r.choice([0, 0, 0, -2, 1])
        if np.linalg.cond(m[:3, :3]) < 1e4:
            return m


SIZES = [(73, 59), (1, 1), (2, 1), (64, 64), (130, 40), (301, 3), (5, 200)]
SEEDS = range(int(os.environ.get("FROM", "0")), int(os.environ.get("TO", "12")))


@pytest.mark.parametrize("seed", SEEDS)
def test_sequences(seed, ball, cube, log, photograph, built, small_ball, cuda_on_cpu):
    r = np.random.default_rng(seed)
    v, f = small_ball
    painted = built("painted", v, f, uv=v[:, :2], materials=np.arange(len(f)) % 7, normals="smooth")
    tiny = built("tiny", v * 1e-9, f)
    huge = built("huge", v * 1e9, f)
    pool = [ball, cube, log, photograph, painted]
    scene = Scene()
    scales = []
    for m in pool[: r.integers(1, 6)]:
        scene.add_mesh(m); scales.append(1.0)
    scene.add_mesh(tiny); scales.append(1e9)
    scene.add_mesh(huge); scales.append(1e-9)

    def add():
        k = int(r.integers(len(scales)))
        m = matrix(r); m[:3, :3] *= scales[k]
        scene.add_instance(k, m)
    for _ in range(r.integers(1, 8)):
        add()
    mk = dict(pixel_error=float(r.choice([0.0, 0.01, 1.0, 5.0, 100.0])), one_sided=bool(r.integers(2)))
    if mk["pixel_error"] < 1: mk["pixel_error"] = float(r.choice([mk["pixel_error"], 1.0]))
    warp = Renderer(scene, "cpu", kernels="warp", **mk)
    cuda = Renderer(scene, "cpu", kernels="cuda", **mk)
    tight = Renderer(scene, "cpu", kernels=str(r.choice(["warp", "cuda"])), **mk)
    odd = Renderer(scene, "cpu", kernels="warp", **mk)
    plain = Renderer(scene, "cpu", kernels="warp", occlusion=False, **mk)
    odd._threads = 13
    rs = [warp, cuda, tight, odd, plain]
    w, h = SIZES[0]
    cams = tuple(random_camera(r, w, h) for _ in range(r.integers(1, 4)))
    for step in range(7):
        op = r.integers(9)
        said = [int(op)]
        if op == 0:
            scene.move(int(r.integers(len(scene))), matrix(r) if r.integers(2) else scene.instances()[1][int(r.integers(len(scene)))].copy())
        elif op == 1:
            add()
        elif op == 2:
            w, h = SIZES[r.integers(len(SIZES))]
            cams = tuple(random_camera(r, w, h) for _ in cams)
        elif op == 3:
            cams = tuple(random_camera(r, w, h) for _ in range(r.integers(1, 4)))
        elif op == 4:
            pe, os_ = float(r.choice([0.3, 1.0, 20.0])), bool(r.integers(2))
            for x in rs: x.pixel_error, x.one_sided = pe, os_
        elif op == 5:
            scene.add_mesh(cube); scales.append(1.0)
        elif op == 6:
            old = (w, h, cams)
            w2, h2 = SIZES[r.integers(len(SIZES))]
            c2 = tuple(random_camera(r, w2, h2) for _ in cams)
            for x in rs: x.render(c2, ("depth",))
        if op != 7 and r.integers(2):
            cams = tuple(nudged(r, c) for c in cams)
        if tight._memory is not None:
            tight._memory = tight._memory.with_room(TIGHT)
        a = warp.render(cams, ALL)
        b = cuda.render(cams, ALL, timings=bool(r.integers(2)))
        where = (seed, step, said)
        assert not diff(a, b, ALL), (where, diff(a, b, ALL))
        sa, sb = dict(vars(a.stats)), dict(vars(b.stats))
        sa.pop("stage_ms"), sb.pop("stage_ms")
        assert sa == sb, where
        assert torch.equal(warp._memory.tensors["hzb_before"], cuda._memory.tensors["hzb_before"]), where
        c = tight.render(cams, ALL)
        assert not diff(a, c, ALL), (where, "tight", diff(a, c, ALL))
        assert c.stats == a.stats, (where, c.stats, a.stats)
        assert torch.equal(warp._memory.tensors["hzb_before"], tight._memory.tensors["hzb_before"]), where
        names = tuple(n for n in ALL if r.integers(3) == 0) or (str(r.choice(ALL)),)
        if r.integers(2): names = (str(r.choice(ALL)),)
        d = odd.render(cams, names)
        assert not diff(a, d, names), (where, "subset", names, diff(a, d, names))
        e = plain.render(cams, [n for n in ALL if n != "overdraw"])
        rest = [n for n in ALL if n != "overdraw"]
        assert not diff(a, e, rest), (where, "plain", diff(a, e, rest))
