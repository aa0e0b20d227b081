import numpy as np
import pytest
import torch
from rooftop.scene import Camera, Renderer, Scene
from rooftop.scene.gbuffers import OUTPUTS
from rooftop.scene.rendering import memory, sort_clusters
from test_attack_fuzz import diff, ALL

def both(scene, cams_list, names=ALL, **mk):
    w, c = Renderer(scene, "cpu", kernels="warp", **mk), Renderer(scene, "cpu", kernels="cuda", **mk)
    met = []
    for cams in cams_list:
        a, b = w.render(cams, names), c.render(cams, names)
        assert not diff(a, b, names), diff(a, b, names)
        assert a.stats == b.stats, (a.stats, b.stats)
        assert torch.equal(w._memory.tensors["hzb_before"].nan_to_num(-7), c._memory.tensors["hzb_before"].nan_to_num(-7))
        met.append(a.stats)
    return met

def at(x, s=1.0):
    m = np.diag([s, s, s, 1.0]); m[0, 3] = x
    return m

@pytest.mark.parametrize("size", [(4097, 3), (3, 4097), (16384, 1), (1, 16384), (129, 129), (128, 65), (8193, 2)])
def test_wide(size, ball, cube, cuda_on_cpu):
    s = Scene(); a, b = s.add_mesh(ball), s.add_mesh(cube)
    s.add_instance(b, at(4.0)); s.add_instance(a, at(9.0)); s.add_instance(a, at(8.0))
    w, h = size
    f = max(w, h) / 3
    cams = []
    for k in range(3):
        pose = Camera.look_at((0, 0.1 * k, 0.05), (5, 0, 0)).world_to_camera
        cams.append((Camera.from_intrinsics([[f, 0, (w - 1) / 2], [0, f, (h - 1) / 2], [0, 0, 1]], pose, w, h),
                     Camera.from_intrinsics([[w / 3, 0, (w - 1) / 2], [0, h / 3, (h - 1) / 2], [0, 0, 1]], pose, w, h)))
    print(both(s, cams))

@pytest.mark.parametrize("count", [65535, 65536])
def test_views(count, cube, cuda_on_cpu):
    s = Scene(); s.add_instance(s.add_mesh(cube), at(4.0))
    c = Camera.look_at((0, 0, 0), (1, 0, 0), width=2, height=1, fov_y_degrees=1)
    Renderer(s, "cpu", kernels="warp").render([c] * count, ("depth",))
    print(Renderer(s, "cpu", kernels="cuda").render([c] * count, ("depth",)).stats)

EXT = [dict(f=1e30), dict(f=1e-30), dict(near=1e-30), dict(near=1e30), dict(shift=1e15), dict(shift=1e300), dict(shift=1e36), dict(shift=3e38),
       dict(scale=1e15), dict(scale=1e-14), dict(f=1e30, shift=1e30), dict(f=1e30, near=1e-30), dict(f=1e20, scale=1e15, shift=1e30), dict(cx=2.0**19), dict(cx=-(2.0**19), f=1e5)]
@pytest.mark.parametrize("k", range(len(EXT)))
@pytest.mark.parametrize("ortho", [False, True])
def test_extremes(k, ortho, ball, cube, cuda_on_cpu):
    e = EXT[k]
    s = Scene(); a, b = s.add_mesh(ball), s.add_mesh(cube)
    sc = e.get("scale", 1.0)
    s.add_instance(b, at(4.0, sc)); s.add_instance(a, at(9.0, sc)); s.add_instance(a, at(0.0, sc))
    cams = []
    for j in range(3):
        m = Camera.look_at((0, 0.1 * j, 0.05), (5, 0, 0)).world_to_camera.copy()
        m[0, 3] += e.get("shift", 0.0)
        f = e.get("f", 30.0)
        cams.append(Camera(m, 60, 40, f, f, e.get("cx", 29.5), 19.5, e.get("near", 0.01), ortho))
    print(e, both(s, cams))

@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 127, 2047, 2048, 2049, 4097, 9000])
def test_sort(n, cuda_on_cpu):
    r = np.random.default_rng(n)
    for room in (n, n + 1, 2 * n + 5000, max(1, n - 1), max(1, n // 2)):
        v = torch.from_numpy(r.permutation(np.unique(r.integers(-(2**62), 2**62, room)))[:room].copy())
        items = v.clone(); out = torch.full_like(items, -5)
        cnt = torch.tensor([0, n], dtype=torch.int32)
        sort_clusters.sort(items, cnt, 1, out)
        k = min(n, len(v))
        assert torch.equal(out[:k], v[:k].sort().values)
        assert (out[k:] == -5).all() and torch.equal(items[k:], v[k:])
