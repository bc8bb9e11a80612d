"""The image itself, built by buildah and run: ``make image-test``, as root."""
