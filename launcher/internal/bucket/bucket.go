// Package bucket opens the target of --checkpoints: a folder, or a bucket of an S3 server.
package bucket

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/soliton-train/soliton/internal/store/archive"
)

// IsURL reports whether text names a target and not a run directory.
func IsURL(text string) bool { return strings.Contains(text, "://") }

// Absolute returns the name of a target that does not depend on the working directory.
func Absolute(text string) (string, error) {
	if text == "" || IsURL(text) {
		return text, nil
	}
	return filepath.Abs(text)
}

// Open opens a target: file:///PATH, s3://BUCKET/PREFIX, or the path of a folder. Of an S3 server, the environment has the keys, as of
// every S3 client: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE and AWS_PROFILE, or the role of the
// machine; AWS_ENDPOINT_URL names a server other than Amazon's, and so does ?endpoint=URL. Nothing is asked of the server yet.
func Open(text string) (archive.Bucket, error) {
	if !IsURL(text) {
		path, err := filepath.Abs(text)
		return archive.Folder{Path: path}, err
	}
	u, err := url.Parse(text)
	if err != nil {
		return nil, errors.New("give a folder, or a URL such as s3://BUCKET/RUN")
	}
	switch u.Scheme {
	case "file":
		if (u.Host != "" && u.Host != "localhost") || u.Path == "" {
			return nil, errors.New("give file:///PATH")
		}
		return archive.Folder{Path: filepath.Clean(filepath.FromSlash(u.Path))}, nil
	case "s3":
		return openS3(text, u)
	}
	return nil, fmt.Errorf("%s:// is not known: give a folder, file:///PATH or s3://BUCKET/RUN", u.Scheme)
}

func openS3(text string, u *url.URL) (archive.Bucket, error) {
	query := u.Query()
	for key := range query {
		if key != "endpoint" && key != "region" {
			return nil, fmt.Errorf("%s is not known: behind ? give endpoint=URL or region=NAME", key)
		}
	}
	if u.Host == "" || u.User != nil {
		return nil, errors.New("give s3://BUCKET/RUN, and keys in the environment")
	}
	server, err := url.Parse(cmp.Or(query.Get("endpoint"), os.Getenv("AWS_ENDPOINT_URL_S3"), os.Getenv("AWS_ENDPOINT_URL"), "https://s3.amazonaws.com"))
	if err != nil || server.Host == "" || server.Scheme != "https" && server.Scheme != "http" {
		return nil, errors.New("endpoint is not the URL of a server: give https://HOST or http://HOST:PORT")
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
	prefix := strings.Trim(u.Path, "/")
	if prefix != "" {
		prefix += "/"
	}
	return &s3{client: client, bucket: u.Host, prefix: prefix, text: text}, nil
}

// s3 is a folder of a bucket.
type s3 struct {
	client         *minio.Client
	bucket, prefix string
	text           string
}

func (s *s3) String() string { return s.text }

// fault adds what the error of the server means.
func fault(name string, err error) error {
	if err == nil {
		return nil
	}
	r := minio.ToErrorResponse(err)
	switch {
	case r.StatusCode == http.StatusPreconditionFailed || r.Code == "PreconditionFailed":
		return fmt.Errorf("%s: %w", name, archive.ErrExists)
	case r.Code == "NoSuchKey":
		return fmt.Errorf("%s: %w", name, archive.ErrMissing)
	}
	return fmt.Errorf("%s: %w", name, err)
}

func (s *s3) Put(ctx context.Context, name string, content io.ReadSeeker, size int64) error {
	_, err := s.client.PutObject(ctx, s.bucket, s.prefix+name, content, size, minio.PutObjectOptions{ContentType: "application/octet-stream"})
	return fault(name, err)
}

func (s *s3) Create(ctx context.Context, name string, content []byte) error {
	o := minio.PutObjectOptions{ContentType: "application/json", DisableMultipart: true}
	o.SetMatchETagExcept("*")
	_, err := s.client.PutObject(ctx, s.bucket, s.prefix+name, bytes.NewReader(content), int64(len(content)), o)
	return fault(name, err)
}

func (s *s3) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	o, err := s.client.GetObject(ctx, s.bucket, s.prefix+name, minio.GetObjectOptions{})
	if err == nil {
		if _, err = o.Stat(); err != nil {
			_ = o.Close()
		}
	}
	if err != nil {
		return nil, fault(name, err)
	}
	return o, nil
}

// maxListed bounds the objects of a run.
const maxListed = 1 << 20

func (s *s3) List(ctx context.Context, folder string) (names []string, err error) {
	listing, cancel := context.WithCancel(ctx) // ends with this
	defer cancel()
	for o := range s.client.ListObjects(listing, s.bucket, minio.ListObjectsOptions{Prefix: s.prefix + folder, Recursive: true}) {
		if o.Err != nil {
			return nil, fault(folder, o.Err)
		}
		if len(names) >= maxListed {
			return nil, fmt.Errorf("%s has more than %d objects", folder, maxListed)
		}
		names = append(names, strings.TrimPrefix(o.Key, s.prefix))
	}
	return names, ctx.Err()
}

func (s *s3) Delete(ctx context.Context, name string) error {
	return fault(name, s.client.RemoveObject(ctx, s.bucket, s.prefix+name, minio.RemoveObjectOptions{}))
}
