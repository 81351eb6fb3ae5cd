"""Uploads to S3 that were begun and not completed: nobody sees them, and they are billed until they are aborted.

A run that fails aborts its uploads; one that is killed cannot. boto3 lists and aborts them, because obstore does not. Google Cloud Storage
and Azure remove the parts of such uploads themselves or by a rule of the bucket.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from reshard.errors import SystemRefusal, UnsupportedError
from reshard.geometry.value import value


@value
class PendingUpload:
    """An upload that is not complete."""

    bucket: str
    """Its bucket."""
    key: str
    """The key of its object."""
    id: str
    """By what S3 knows it."""
    begun: float
    """When it was begun, in seconds since 1970."""
    nbytes: int
    """The bytes of its parts."""


class PendingUploads:
    """The pending uploads below a URL s3://BUCKET/PREFIX."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        try:
            import boto3
        except ImportError:
            raise UnsupportedError(
                "boto3, which lists uploads, is not installed", where=url, do="Install the extra: pip install 'reshard[cloud]'"
            ) from None
        self._bucket, _, self._prefix = url.partition("://")[2].rstrip("/").partition("/")
        endpoint = options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        self._s3: Any = boto3.client("s3", endpoint_url=endpoint, region_name=options.get("region"))
        self._url = url

    def list(self) -> list[PendingUpload]:
        """The uploads, oldest first. Raises SystemRefusal if S3 refuses."""
        prefix = f"{self._prefix}/" if self._prefix else ""
        try:
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            uploads = [self._upload(upload) for page in pages for upload in page.get("Uploads", ())]
        except Exception as error:
            raise self._refusal(error) from error
        return sorted(uploads, key=lambda upload: upload.begun)

    def abort(self, upload: PendingUpload) -> None:
        """Remove an upload and its parts. Raises SystemRefusal if S3 refuses."""
        try:
            self._s3.abort_multipart_upload(Bucket=upload.bucket, Key=upload.key, UploadId=upload.id)
        except Exception as error:
            raise self._refusal(error) from error

    def _upload(self, upload: Mapping[str, Any]) -> PendingUpload:
        pages = self._s3.get_paginator("list_parts").paginate(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        nbytes = sum(part["Size"] for page in pages for part in page.get("Parts", ()))
        return PendingUpload(self._bucket, upload["Key"], upload["UploadId"], upload["Initiated"].timestamp(), nbytes)

    def _refusal(self, error: Exception) -> SystemRefusal:
        return SystemRefusal(
            f"its uploads cannot be listed or aborted: {error}", where=self._url, do="Check the credentials and permissions"
        )
