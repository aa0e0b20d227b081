"""Shadows of scenes whose pages are loaded and evicted. After waiting, shadows equal those with resident pages. In a
scene at rest, they become equal without waiting."""

from __future__ import annotations

import numpy as np
import torch

from rooftop.scene import Camera, DirectionalLight, GBuffer, Geometry, Renderer, Scene, SpotLight, layouts

OUTPUTS = ("shadow", "color", "depth")
SIZE = {"width": 80, "height": 60}


def world(*meshes: Geometry) -> Scene:
    """One mesh before another, lit from the side, so that many objects that cast shadows are outside the picture."""
    scene = Scene()
    for at, mesh in enumerate(meshes):
        matrix = np.eye(4)
        matrix[:3, 3] = 2.5 * at, 1.5 * at, 0
        scene.add_instance(scene.add_mesh(mesh), matrix)
    scene.add_light(DirectionalLight((1, 0.7, -0.4), size=64, cascades=2))
    scene.add_light(SpotLight((-3, 0, 4), (3, 0, -4), size=64))
    return scene


def camera(step: float) -> Camera:
    return Camera.look_at((-3 + step, -4, 2 + step), (1, 0.5, 0), **SIZE)


def same(a: GBuffer, b: GBuffer) -> bool:
    return all(torch.equal(a[name].nan_to_num(-7.0), b[name].nan_to_num(-7.0)) for name in OUTPUTS)


def test_waited_for_shadows_are_the_resident_ones(paged_ball: Geometry, paged_knot: Geometry, device: str) -> None:
    scene = world(paged_ball, paged_knot)
    resident, streamed = (
        Renderer(scene, device, pixel_error=0.15),
        Renderer(scene, device, pixel_error=0.15, pool_bytes=10**9),
    )
    loaded = 0
    for step in (0.0, 0.02, 0.8):
        expected, found = (renderer.render(camera(step), OUTPUTS) for renderer in (resident, streamed))
        assert found.stats.streaming is not None
        loaded += found.stats.streaming.loaded
        assert found.stats.streaming.missing == 0
        assert same(found, expected)
    assert loaded > 25


def test_at_rest_shadows_become_the_resident_ones(paged_ball: Geometry, device: str) -> None:
    """Frames that do not wait draw maps with the available pages, and draw them again when more pages have come."""
    scene = world(paged_ball)
    expected = Renderer(scene, device, pixel_error=0.15).render(camera(0), OUTPUTS)
    renderer = Renderer(scene, device, pixel_error=0.15, pool_bytes=10**9)
    first = renderer.render(camera(0), OUTPUTS, wait=False)
    assert first["shadow"].isfinite().any()
    maps = [first.stats.shadow_maps]
    for _ in range(400):
        frame = renderer.render(camera(0), OUTPUTS, wait=False)
        maps.append(frame.stats.shadow_maps)
        assert frame.stats.streaming is not None
        if not frame.stats.streaming.missing and not frame.stats.shadow_maps:
            break
    assert same(frame, expected)
    assert maps[0] == 3
    assert sum(maps[1:]) >= 3
    assert maps[-1] == 0


def test_in_a_pool_too_small_shadows_have_no_holes(paged_ball: Geometry, device: str) -> None:
    """The pool holds 1/20 of all pages. Shadows are coarser, but their meshes are closed."""
    scene = world(paged_ball)
    renderer = Renderer(scene, device, pixel_error=0.15, pool_bytes=int(0.05 * paged_ball.pages) * layouts.PAGE_BYTES)
    frame = renderer.render(camera(0), OUTPUTS)
    again = Renderer(
        scene, device, pixel_error=0.15, pool_bytes=int(0.05 * paged_ball.pages) * layouts.PAGE_BYTES
    ).render(camera(0), OUTPUTS)
    assert frame.stats.streaming is not None
    assert frame.stats.streaming.missing > 0
    assert same(frame, again)
    resident = Renderer(scene, device, pixel_error=0.15).render(camera(0), OUTPUTS)
    covered = frame["depth"].isfinite() & resident["depth"].isfinite()
    assert (frame["depth"].isfinite() == resident["depth"].isfinite()).float().mean() > 0.97
    apart = (frame["shadow"] - resident["shadow"]).abs()[covered]
    assert (apart < 0.5).float().mean() > 0.9
