// Package k8stest decodes manifests with the types of Kubernetes. It is a module of its own, so that users do not get those.
package k8stest

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/soliton-train/soliton/launcher/internal/kube"
)

// Every field of a manifest is one that Kubernetes knows, strings stay what they are, and the objects refer to each other.
func TestManifest(t *testing.T) {
	program := []string{"/train", "--steps", "1000", "--text", "a \"b\"\n\x01ü $(HOME) # {", "yes", "1e3", ""}
	for _, name := range []string{"gpt", "true", "n", "a-1"} {
		j := kube.Job{Name: name, Image: "registry:5000/gpt@sha256:0", Hosts: 3, Workers: 2, Program: program, Key: strings.Repeat("1e", 32)}
		if err := j.Validate(); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := j.Write(&b); err != nil {
			t.Fatal(err)
		}
		var secret core.Secret
		var service core.Service
		var job batch.Job
		parts := strings.Split(b.String(), "\n---\n")
		if len(parts) != 3 {
			t.Fatalf("%d objects", len(parts))
		}
		for i, to := range []any{&secret, &service, &job} {
			if err := yaml.UnmarshalStrict([]byte(parts[i]), to); err != nil {
				t.Fatalf("%v\n%s", err, parts[i])
			}
		}
		spec, pod := job.Spec, job.Spec.Template.Spec
		if secret.Kind != "Secret" || service.Kind != "Service" || job.Kind != "Job" || secret.StringData["key"] != j.Key ||
			secret.Name != name || service.Name != name || job.Name != name || pod.Subdomain != name || pod.Volumes[0].Secret.SecretName != name ||
			service.Spec.Selector["batch.kubernetes.io/job-name"] != name {
			t.Errorf("%s: the objects do not belong together:\n%s", name, &b)
		}
		if service.Spec.ClusterIP != core.ClusterIPNone || !service.Spec.PublishNotReadyAddresses {
			t.Error("the service is not headless, or waits until pods are ready")
		}
		if *spec.CompletionMode != batch.IndexedCompletion || *spec.Completions != 3 || *spec.Parallelism != 3 || pod.RestartPolicy != core.RestartPolicyNever {
			t.Errorf("%+v", spec)
		}
		rules := spec.PodFailurePolicy.Rules
		if len(rules) != 2 || rules[0].Action != batch.PodFailurePolicyActionIgnore || rules[1].Action != batch.PodFailurePolicyActionIgnore ||
			rules[0].OnPodConditions[0].Type != core.DisruptionTarget || !slices.Equal(rules[1].OnExitCodes.Values, []int32{75}) ||
			*rules[1].OnExitCodes.ContainerName != pod.Containers[0].Name {
			t.Errorf("%+v", rules)
		}
		if *pod.Volumes[0].Secret.DefaultMode != 0o400 {
			t.Errorf("the key has mode %o", *pod.Volumes[0].Secret.DefaultMode)
		}
		want := append([]string{"run", "--plain", "--workers", "2"}, program...)
		want[8] = strings.ReplaceAll(want[8], "$(", "$$(")
		if got := pod.Containers[0].Args; !slices.Equal(got, want) {
			t.Errorf("%q, not %q", got, want)
		}
	}
}
