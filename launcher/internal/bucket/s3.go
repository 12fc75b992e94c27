package bucket

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/soliton-train/soliton/internal/store/archive"
)

// openS3 opens a folder of a bucket of an S3 server. The environment has the keys, as of every S3 client: AWS_ACCESS_KEY_ID and
// AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE and AWS_PROFILE, or the role of the machine. AWS_ENDPOINT_URL names a server
// other than Amazon's, and so does ?endpoint=URL.
func openS3(text, bucket, prefix string, query url.Values) (archive.Bucket, error) {
	server, err := server(cmp.Or(query.Get("endpoint"), os.Getenv("AWS_ENDPOINT_URL_S3"), os.Getenv("AWS_ENDPOINT_URL"), "https://s3.amazonaws.com"))
	if err != nil {
		return nil, err
	}
	client, err := minio.New(server.Host, &minio.Options{
		Secure: server.Scheme == "https",
		Region: cmp.Or(query.Get("region"), os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION")),
		Creds: credentials.NewChainCredentials([]credentials.Provider{
			&credentials.EnvAWS{}, &credentials.FileAWSCredentials{}, &credentials.IAM{},
		}),
		MaxRetries: 3, // the host tries again, later
	})
	if err != nil {
		return nil, err
	}
	return &s3{client: client, bucket: bucket, prefix: prefix, text: text}, nil
}

// s3 is a folder of a bucket.
type s3 struct {
	client         *minio.Client
	bucket, prefix string
	text           string
}

func (s *s3) String() string { return s.text }

// fault says what the error of the server means.
func (s *s3) fault(name string, err error) error {
	if err == nil {
		return nil
	}
	r := minio.ToErrorResponse(err)
	switch {
	case r.StatusCode == http.StatusPreconditionFailed || r.Code == "PreconditionFailed":
		return fmt.Errorf("%s: %w", name, archive.ErrExists)
	case r.Code == minio.NoSuchKey:
		return fmt.Errorf("%s: %w", name, archive.ErrMissing)
	case r.Code == minio.NoSuchBucket:
		return noBucket(s.bucket)
	case slices.Contains(refusals, r.Code):
		return refused(r.Code, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and what they may do")
	}
	return fmt.Errorf("%s: %w", name, line(err))
}

// refusals are the codes for wrong keys and missing rights.
var refusals = []string{minio.AccessDenied, "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"}

func (s *s3) Put(ctx context.Context, name string, content io.ReadSeeker, size int64) error {
	_, err := s.client.PutObject(ctx, s.bucket, s.prefix+name, content, size, minio.PutObjectOptions{ContentType: "application/octet-stream"})
	return s.fault(name, err)
}

func (s *s3) Create(ctx context.Context, name string, content []byte) error {
	o := minio.PutObjectOptions{ContentType: "application/json", DisableMultipart: true}
	o.SetMatchETagExcept("*")
	_, err := s.client.PutObject(ctx, s.bucket, s.prefix+name, bytes.NewReader(content), int64(len(content)), o)
	return s.fault(name, err)
}

func (s *s3) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	o, err := s.client.GetObject(ctx, s.bucket, s.prefix+name, minio.GetObjectOptions{})
	if err == nil {
		if _, err = o.Stat(); err != nil {
			_ = o.Close()
		}
	}
	if err != nil {
		return nil, s.fault(name, err)
	}
	return o, nil
}

func (s *s3) List(ctx context.Context, folder string) (names []string, err error) {
	listing, cancel := context.WithCancel(ctx) // ends with this
	defer cancel()
	for o := range s.client.ListObjects(listing, s.bucket, minio.ListObjectsOptions{Prefix: s.prefix + folder, Recursive: true}) {
		if o.Err != nil {
			return nil, s.fault(folder, o.Err)
		}
		if len(names) >= maxListed {
			return nil, fmt.Errorf("%s has more than %d objects", folder, maxListed)
		}
		names = append(names, strings.TrimPrefix(o.Key, s.prefix))
	}
	return names, ctx.Err()
}

func (s *s3) Delete(ctx context.Context, name string) error {
	return s.fault(name, s.client.RemoveObject(ctx, s.bucket, s.prefix+name, minio.RemoveObjectOptions{}))
}
