"""The viewer: a page in a browser that shows a scene, and the server of its pictures (`rooftop scene view`)."""
