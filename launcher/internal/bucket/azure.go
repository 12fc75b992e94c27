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
	"strings"
	"sync"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/streaming"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blob"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/bloberror"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blockblob"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"

	"github.com/soliton-train/soliton/internal/store/archive"
)

// openAzure opens a folder of a container of Azure Blob Storage. The environment has AZURE_STORAGE_CONNECTION_STRING, or
// AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN. With an account alone, the credentials are those that all
// clients of Azure find: AZURE_CLIENT_ID and its like, the identity of the workload or machine, or that of the command az.
func openAzure(text, bucket, prefix string, query url.Values) (archive.Bucket, error) {
	client, err := azureContainer(bucket, query)
	if err != nil {
		return nil, err
	}
	return &blobs{client: client, bucket: bucket, prefix: prefix, text: text}, nil
}

func azureContainer(name string, query url.Values) (*container.Client, error) {
	if connection := os.Getenv("AZURE_STORAGE_CONNECTION_STRING"); connection != "" {
		client, err := container.NewClientFromConnectionString(connection, name, nil)
		if err != nil { // which may quote it
			return nil, errors.New("AZURE_STORAGE_CONNECTION_STRING is not what Azure gives: it has AccountName=…;AccountKey=… or BlobEndpoint=…;SharedAccessSignature=…")
		}
		return client, nil
	}
	account := cmp.Or(query.Get("account"), os.Getenv("AZURE_STORAGE_ACCOUNT"))
	endpoint := cmp.Or(query.Get("endpoint"), os.Getenv("AZURE_STORAGE_SERVICE_ENDPOINT"))
	if account == "" && endpoint == "" {
		return nil, errors.New("set AZURE_STORAGE_ACCOUNT, or give ?account=NAME")
	}
	at, err := server(cmp.Or(endpoint, "https://"+account+".blob.core.windows.net"))
	if err != nil {
		return nil, err
	}
	at = at.JoinPath(name)
	key, token := os.Getenv("AZURE_STORAGE_KEY"), strings.TrimPrefix(os.Getenv("AZURE_STORAGE_SAS_TOKEN"), "?")
	switch {
	case key != "":
		if account == "" {
			return nil, errors.New("AZURE_STORAGE_KEY is that of an account: set AZURE_STORAGE_ACCOUNT, or give ?account=NAME")
		}
		shared, err := container.NewSharedKeyCredential(account, key)
		if err != nil {
			return nil, errors.New("AZURE_STORAGE_KEY is not what Azure gives: it is in base64")
		}
		return container.NewClientWithSharedKeyCredential(at.String(), shared, nil)
	case token != "":
		return container.NewClientWithNoCredential(at.String()+"?"+token, nil)
	}
	return container.NewClient(at.String(), &lazy{}, nil)
}

// lazy finds the credentials when they are first needed.
type lazy struct {
	mu    sync.Mutex
	found azcore.TokenCredential
}

func (l *lazy) GetToken(ctx context.Context, o policy.TokenRequestOptions) (azcore.AccessToken, error) {
	l.mu.Lock()
	if l.found == nil {
		found, err := azidentity.NewDefaultAzureCredential(nil)
		if err != nil {
			l.mu.Unlock()
			return azcore.AccessToken{}, err
		}
		l.found = found
	}
	l.mu.Unlock()
	return l.found.GetToken(ctx, o)
}

// blobs is a folder of a container.
type blobs struct {
	client         *container.Client
	bucket, prefix string
	text           string
}

func (b *blobs) String() string { return b.text }

const azureFix = "AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY or its like, and what they may do"

// fault says what the error of the server means.
func (b *blobs) fault(name string, err error) error {
	if err == nil {
		return nil
	}
	var answer *azcore.ResponseError
	if !errors.As(err, &answer) {
		var failed *azidentity.AuthenticationFailedError
		switch {
		case strings.HasPrefix(err.Error(), "DefaultAzureCredential: ") && os.Getenv("AZURE_CLIENT_ID") == "":
			return errors.New("no credentials: set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, or give the machine an identity")
		case errors.As(err, &failed) || strings.HasPrefix(err.Error(), "DefaultAzureCredential: "):
			return refused(line(err).Error(), azureFix)
		}
		return fmt.Errorf("%s: %w", name, line(err))
	}
	switch {
	case bloberror.HasCode(err, bloberror.BlobAlreadyExists, bloberror.ConditionNotMet):
		return fmt.Errorf("%s: %w", name, archive.ErrExists)
	case bloberror.HasCode(err, bloberror.BlobNotFound):
		return fmt.Errorf("%s: %w", name, archive.ErrMissing)
	case bloberror.HasCode(err, bloberror.ContainerNotFound):
		return noBucket(b.bucket)
	case answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden:
		return refused(cmp.Or(answer.ErrorCode, fmt.Sprint(answer.StatusCode)), azureFix)
	}
	return fmt.Errorf("%s: the server answers %d %s", name, answer.StatusCode, answer.ErrorCode)
}

// Blocks of a blob: at most 50,000, of which two are sent at a time.
const (
	azureBlock  = 8 << 20
	azureBlocks = 50_000
)

func (b *blobs) Put(ctx context.Context, name string, content io.ReadSeeker, size int64) error {
	_, err := b.client.NewBlockBlobClient(b.prefix+name).UploadStream(ctx, content, &blockblob.UploadStreamOptions{
		BlockSize: max(azureBlock, size/azureBlocks+1), Concurrency: 2,
	})
	return b.fault(name, err)
}

func (b *blobs) Create(ctx context.Context, name string, content []byte) error {
	_, err := b.client.NewBlockBlobClient(b.prefix+name).Upload(ctx, streaming.NopCloser(bytes.NewReader(content)), &blockblob.UploadOptions{
		AccessConditions: &blob.AccessConditions{ModifiedAccessConditions: &blob.ModifiedAccessConditions{IfNoneMatch: to.Ptr(azcore.ETagAny)}},
	})
	return b.fault(name, err)
}

func (b *blobs) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	r, err := b.client.NewBlobClient(b.prefix+name).DownloadStream(ctx, nil)
	if err != nil {
		return nil, b.fault(name, err)
	}
	return r.NewRetryReader(ctx, nil), nil
}

func (b *blobs) List(ctx context.Context, folder string) (names []string, err error) {
	pages := b.client.NewListBlobsFlatPager(&container.ListBlobsFlatOptions{Prefix: to.Ptr(b.prefix + folder)})
	for pages.More() {
		page, err := pages.NextPage(ctx)
		if err != nil {
			return nil, b.fault(folder, err)
		}
		if page.Segment == nil {
			return nil, fmt.Errorf("%s: the server's list has no blobs", folder)
		}
		for _, item := range page.Segment.BlobItems {
			if item.Name != nil {
				names = append(names, strings.TrimPrefix(*item.Name, b.prefix))
			}
		}
		if len(names) > maxListed {
			return nil, fmt.Errorf("%s has more than %d objects", folder, maxListed)
		}
	}
	return names, nil
}

func (b *blobs) Delete(ctx context.Context, name string) error {
	_, err := b.client.NewBlobClient(b.prefix+name).Delete(ctx, nil)
	if err = b.fault(name, err); errors.Is(err, archive.ErrMissing) {
		return nil
	}
	return err
}
