"""Lines of eager code for `test_same_as_plain`, each for itself: `;` between statements, and `|` between lines.

The names in them: w and u, 8 by 6, placed as the case says; b, 6 numbers, Shard(0); s, one number of which each rank holds
a summand. Plain: r, 8 by 6; c, 6 numbers; n, one number.
"""
from __future__ import annotations


def _lines(text: str) -> list[str]:
    return [line.strip() for line in " ".join(text.split()).split(" | ")]


CHANGES = _lines("""
    w.set_(r * 2); w.add_(1) | w.data.set_(r * 2) | w.data.set_(u) | b.set_(c * 2) | w.view(torch.int64).bitwise_and_(-4) |
    w.view(torch.int32)[2, ::2].zero_() | w[1].view(torch.int32).zero_() | w[1][2:4].zero_() |
    w.add_(u) | w.add_(r) | w.add_(b) | w.add_(c) | w.add_(s) | w.add_(n) | w.add_(w) | w.sub_(u) | w.sub_(r) | w.sub_(b)
    | w.sub_(c) | w.sub_(s) | w.sub_(n) | w.sub_(w) | w.mul_(u) | w.mul_(r) | w.mul_(b) | w.mul_(c) | w.mul_(s) |
    w.mul_(n) | w.mul_(w) | w.div_(u) | w.div_(r) | w.div_(b) | w.div_(c) | w.div_(s) | w.div_(n) | w.div_(w) | w.copy_(u)
    | w.copy_(r) | w.copy_(b) | w.copy_(c) | w.copy_(s) | w.copy_(n) | w.copy_(w) | w.pow_(u) | w.pow_(r) | w.pow_(b) |
    w.pow_(c) | w.pow_(s) | w.pow_(n) | w.pow_(w) | w.clamp_min_(u) | w.clamp_min_(r) | w.clamp_min_(b) | w.clamp_min_(c)
    | w.clamp_min_(s) | w.clamp_min_(n) | w.clamp_min_(w) | w.fmod_(u) | w.fmod_(r) | w.fmod_(b) | w.fmod_(c) | w.fmod_(s)
    | w.fmod_(n) | w.fmod_(w) | w.remainder_(u) | w.remainder_(r) | w.remainder_(b) | w.remainder_(c) | w.remainder_(s) |
    w.remainder_(n) | w.remainder_(w) | w.atan2_(u) | w.atan2_(r) | w.atan2_(b) | w.atan2_(c) | w.atan2_(s) | w.atan2_(n)
    | w.atan2_(w) | w.hypot_(u) | w.hypot_(r) | w.hypot_(b) | w.hypot_(c) | w.hypot_(s) | w.hypot_(n) | w.hypot_(w) |
    w.copysign_(u) | w.copysign_(r) | w.copysign_(b) | w.copysign_(c) | w.copysign_(s) | w.copysign_(n) | w.copysign_(w) |
    w.heaviside_(u) | w.heaviside_(r) | w.heaviside_(b) | w.heaviside_(c) | w.heaviside_(s) | w.heaviside_(n) |
    w.heaviside_(w) | w.xlogy_(u) | w.xlogy_(r) | w.xlogy_(b) | w.xlogy_(c) | w.xlogy_(s) | w.xlogy_(n) | w.xlogy_(w) |
    r.add_(w) | r.add_(b) | r.add_(s) | r.sub_(w) | r.sub_(b) | r.sub_(s) | r.mul_(w) | r.mul_(b) | r.mul_(s) | r.div_(w)
    | r.div_(b) | r.div_(s) | r.copy_(w) | r.copy_(b) | r.copy_(s) | r.pow_(w) | r.pow_(b) | r.pow_(s) | r.clamp_min_(w) |
    r.clamp_min_(b) | r.clamp_min_(s) | r.fmod_(w) | r.fmod_(b) | r.fmod_(s) | r.remainder_(w) | r.remainder_(b) |
    r.remainder_(s) | r.atan2_(w) | r.atan2_(b) | r.atan2_(s) | r.hypot_(w) | r.hypot_(b) | r.hypot_(s) | r.copysign_(w) |
    r.copysign_(b) | r.copysign_(s) | r.heaviside_(w) | r.heaviside_(b) | r.heaviside_(s) | r.xlogy_(w) | r.xlogy_(b) |
    r.xlogy_(s) | n.add_(s) | n.sub_(s) | n.mul_(s) | n.div_(s) | n.copy_(s) | n.pow_(s) | n.clamp_min_(s) | n.fmod_(s) |
    n.remainder_(s) | n.atan2_(s) | n.hypot_(s) | n.copysign_(s) | n.heaviside_(s) | n.xlogy_(s) | w += u | w += r | w +=
    b | w += c | w += s | w += n | r += w | r += b | r += s | n += s | s += n | s += s | w -= u | w -= r | w -= b | w -= c
    | w -= s | w -= n | r -= w | r -= b | r -= s | n -= s | s -= n | s -= s | w *= u | w *= r | w *= b | w *= c | w *= s |
    w *= n | r *= w | r *= b | r *= s | n *= s | s *= n | s *= s | w /= u | w /= r | w /= b | w /= c | w /= s | w /= n | r
    /= w | r /= b | r /= s | n /= s | s /= n | s /= s | w **= u | w **= r | w **= b | w **= c | w **= s | w **= n | r **=
    w | r **= b | r **= s | n **= s | s **= n | s **= s | w.abs_() | w.exp_() | w.sqrt_() | w.neg_() | w.sigmoid_() |
    w.tanh_() | w.zero_() | w.round_() | w.sign_() | w.relu_() | w.nan_to_num_() | w.square_() | w.normal_() |
    w.uniform_() | w.exponential_() | s.add_(1) | s.mul_(3) | s.zero_() | s.neg_() | s.add_(n) | s.copy_(n) | s.fill_(2.)
    | s.fill_(n) | n += w.abs().sum() | n.add_(w.norm()) | n.copy_(w.max()) | n.fill_(w.sum()) | n.lerp_(s, .3) |
    n.addcmul_(s, s) | c.copy_(b) | c[2] = b[2] | c[2:4] = b[2:4] | r[0] = w[0] | r[:, 1] += w[:, 1] | r[r > 0] = s | r[w
    > 0] = 0. | r.index_add_(0, torch.tensor([1]), w[:1]) | r.masked_fill_(w > 0, -1.) | r.scatter_(0, torch.zeros(1,
    6).long(), w) | r.addmm_(w, u.t() @ u) | r.add_(w, alpha=2) | r.addcmul_(w, u, value=.1) | r.lerp_(w, .3) |
    r.view(-1).add_(w.view(-1)) | r.data.add_(w) | r.t().copy_(w.t()) | torch.add(w, u, out=r) | torch.mul(w, 2, out=w) |
    torch.add(r, 1, out=w) | torch.max(w, 0, out=(c, c.long())) | torch.max(r, 0, out=(b, torch.zeros(6).long())) |
    torch.sum(w, 0, out=c) | torch.sort(w, 0, out=(r, torch.zeros(8, 6).long())) | torch.matmul(w, u.t() @ u, out=r) |
    torch.frexp(w, out=(r, torch.zeros(8, 6).int())) | torch.linalg.norm(w, out=n) | w.addcmul_(u, r) | w.addcdiv_(u,
    r.abs() + 1, value=2) | w.lerp_(r, .2) | w.lerp_(u, r.abs().clamp(0, 1)) | w.addmm_(r, torch.eye(6)) |
    w.addr_(torch.ones(8), b) | w.clamp_(-.1, .1) | w.clamp_(min=r) | w.clamp_(b) | w.masked_fill_(r > 0, 5.) |
    w.masked_fill_(w > 0, 5.) | w.index_fill_(0, torch.tensor([1, 7]), 3.) | w.cumsum_(0) | w.index_copy_(0,
    torch.tensor([0, 7]), r[:2]) | w.scatter_(1, torch.zeros(8, 1).long(), 5.) | w.triu_() | w.tril_(1) |
    w.fill_diagonal_(3.) | w.put_(torch.tensor([3]), torch.ones(1)) | w.renorm_(2, 0, .5) | w.random_(5) | w.log_normal_()
    | w.bernoulli_(.5) | w.geometric_(.5) | w.cauchy_() | w.copy_(r.t().contiguous().view(8, 6)) | w.data = r | w.data =
    w.data * 2 + r | w.data.add_(r) | w.grad = r * 1; w.grad.mul_(2); w.sub_(w.grad) | w.grad = u; u.zero_();
    w.sub_(w.grad) | v = w[0]; v.add_(1) | v = w[0]; w.mul_(2); r[0] = v | v = w[:, 2]; w.zero_(); c[0] = v.sum() | v =
    w.t(); v[1] = 3. | v = w.view(-1); v.mul_(2); v[3] = 7. | v = w.view(-1); w.add_(1); n.add_(v.sum()) | v =
    w.reshape(6, 8); v[0] = 1. | v = w.flatten(); v[0] = 9. | v = w.ravel(); v.neg_() | v = w[2:6][1:3]; v.fill_(9.) | v =
    w[2:6]; q = v[1]; q.zero_(); r[:4] = v | v = w[1]; q = w[1]; v.zero_(); c.copy_(q) | v, q = w.chunk(2); v.copy_(q) |
    [q.mul_(i) for i, q in enumerate(w)] | w.unbind(1)[2].zero_() | w.split([3, 5])[1].add_(1) | w.diagonal().fill_(2.) |
    w.as_strided((3,), (2,)).zero_() | w.unsqueeze(0).expand(1, 8, 6)[0, 0].add_(1) | w.narrow(1, 2, 3).copy_(r[:, 2:5]) |
    w.T[2].add_(b[0]) | w.mT.mul_(2) | w.movedim(0, 1)[0] = 4. | w.view(2, 4, 6)[1, 2] = 4. | w.unflatten(0, (2,
    4))[1].neg_() | w.swapaxes(0, 1)[3, 3] = 0. | v = w[3]; w.data = r; v.zero_() | v = w[..., 1:3]; v += 1 | w[None][0,
    1] = 3. | w.select(0, 3).copy_(c) | w.squeeze()[1] = 2. | w.detach().zero_() | w.detach()[3] = 1. |
    w.contiguous().add_(1) | w.to(torch.float64).add_(1) | w.double().mul_(2) | w.clone().zero_() | w.float().zero_() |
    w[torch.tensor([1, 2])].zero_() | w[w > 0].zero_() | w.view_as(r).zero_() | w.real.mul_(2) | v = w.unfold(0, 2, 2);
    v[0].zero_() | w.hsplit(2)[1].zero_() | w.tensor_split(3)[1].mul_(0) | w[0], w[1] = w[1].clone(), w[0].clone() | w[[0,
    1]] = w[[1, 0]] | w[:, :3] = w[:, 3:] | w[1:] -= w[:-1].clone() | torch._foreach_add_([w, r], [u, u]) |
    torch._foreach_add_([n, w], 2.) | torch._foreach_mul_([r, w, c], [u, u, b]) | torch._foreach_add_([n], [s]) |
    torch._foreach_copy_([r, w, c], [u, u, b]) | torch._foreach_zero_([w, n, s]) | torch._foreach_lerp_([r], [w], .5) |
    torch._foreach_addcmul_([r, w], [u, u], [u, u], .5) | torch._foreach_sqrt_([r.abs_(), w]) |
    torch._foreach_clamp_min_([r, w], [u, u]) | torch._foreach_add_([w], [r], alpha=2) | torch._foreach_mul_([w], n) |
    torch._foreach_mul_([w, r], s) | torch._foreach_neg_((w, r)) | torch._foreach_div_([w, c], [u, b]) |
    torch._foreach_pow_([w], 2) | F.relu(w, inplace=True) | F.dropout(w, .5, inplace=True) | F.leaky_relu(w, .1, True) |
    F.hardtanh(w, inplace=True) | F.batch_norm(r, c, b.exp_(), training=True) | F.embedding(torch.tensor([1, 5]), w,
    max_norm=.1) | F.normalize(w, out=r) | F.instance_norm(r.view(1, 8, 6), w[:, 0].clone(), r[:, 0].clone()) |
    F.batch_norm(w, c, c.abs().exp(), training=True) | F.threshold(w, 0., 1., inplace=True) | nn.init.normal_(w) |
    nn.init.xavier_uniform_(w) | nn.init.kaiming_uniform_(w, a=5 ** .5) | nn.init.orthogonal_(w) |
    nn.init.trunc_normal_(w) | nn.init.sparse_(w, .5) | nn.init.constant_(s, 2.) | nn.init.dirac_(w.view(8, 3, 2)) |
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([w, b]) * 2, [w, b]) |
    nn.utils.vector_to_parameters(torch.arange(54.), [w, b]) | nn.utils.vector_to_parameters(torch.arange(54.), [r, b]) |
    w.grad = u * 1; b.grad = c; nn.utils.clip_grad_norm_([w, b], .1); n.add_(w.grad.sum()); c.copy_(b.grad) | w.grad = u *
    1; r.grad = r * 2; n.add_(nn.utils.clip_grad_norm_([w, r], .1)); r.copy_(w.grad) | w.grad = u * 1;
    nn.utils.clip_grad_value_([w], .1); r.copy_(w.grad) | w.grad = u * 1; w.grad[0] = 3.; w.grad.data.mul_(2);
    r.copy_(w.grad)
""")

VALUES = _lines("""
    w + u | w + r | w + b | w + c | w + s | w + n | w + 2 | w - u | w - r | w - b | w - c | w - s | w - n | w - 2 | w * u
    | w * r | w * b | w * c | w * s | w * n | w * 2 | w / u | w / r | w / b | w / c | w / s | w / n | w / 2 | w ** u | w
    ** r | w ** b | w ** c | w ** s | w ** n | w ** 2 | w == u | w == r | w == b | w == c | w == s | w == n | w == 2 | w <
    u | w < r | w < b | w < c | w < s | w < n | w < 2 | w >= u | w >= r | w >= b | w >= c | w >= s | w >= n | w >= 2 | w %
    u | w % r | w % b | w % c | w % s | w % n | w % 2 | r + w | c + w | n + w | 2 + w | r - w | c - w | n - w | 2 - w | r
    * w | c * w | n * w | 2 * w | r / w | c / w | n / w | 2 / w | r < w | c < w | n < w | 2 < w | r @ w | w @ u.t() | w @
    b | w.t() @ r | w.matmul(c) | torch.mm(w, u.t()) | torch.bmm(w[None], u.t()[None]) | F.linear(r, w) | w.sum() |
    w.sum(0) | w.sum(1) | w.mean() | w.mean(0) | w.mean(1) | w.std() | w.std(0) | w.std(1) | w.var() | w.var(0) | w.var(1)
    | w.prod() | w.prod(0) | w.prod(1) | w.amax() | w.amax(0) | w.amax(1) | w.amin() | w.amin(0) | w.amin(1) | w.norm() |
    w.norm(0) | w.norm(1) | w.argmax() | w.argmax(0) | w.argmax(1) | w.median() | w.median(0) | w.median(1) | w.all() |
    w.all(0) | w.all(1) | w.any() | w.any(0) | w.any(1) | w.logsumexp(0) | w.logsumexp(1) | w.cumsum(0) | w.cumsum(1) |
    w.softmax(0) | w.softmax(1) | w.cumprod(0) | w.cumprod(1) | w.nansum() | w.nansum(0) | w.nansum(1) | w.count_nonzero()
    | w.count_nonzero(0) | w.count_nonzero(1) | w.argsort() | w.argsort(0) | w.argsort(1) | w.max() | w.max(0) | w.max(1)
    | w.min() | w.min(0) | w.min(1) | w.sort() | w.sort(0) | w.sort(1) | w.mode() | w.mode(0) | w.mode(1) | w.norm(2) |
    w.norm(3) | w.norm(float('inf')) | w.norm(-float('inf')) | w.norm('fro') | w.norm('nuc') | w.norm(2, 0) | w.norm(1, 1)
    | w.norm(2, (0, 1)) | torch.linalg.norm(w) | torch.linalg.vector_norm(w, 3) | torch.linalg.vector_norm(w, 2, 1) |
    torch.linalg.vector_norm(w, float('inf'), 0) | torch.linalg.matrix_norm(w) | torch.linalg.matrix_norm(w, 2) |
    torch.linalg.svdvals(w) | torch.linalg.det(w.t() @ w) | torch.linalg.inv(w.t() @ w) | torch.linalg.solve(w.t() @ w, b)
    | torch.linalg.matrix_rank(w) | torch.linalg.cond(w) | torch.linalg.pinv(w) | torch.linalg.multi_dot([w, u.t(), w]) |
    torch.linalg.eigvalsh(w.t() @ w) | torch.linalg.cholesky(w.t() @ w) | torch.linalg.lstsq(r, w) | w.abs() | w.exp() |
    w.sqrt() | w.sigmoid() | w.tanh() | w.relu() | w.sign() | w.neg() | w.square() | w.isnan() | w.isfinite() | w.floor()
    | w.erf() | w.sinh() | w.reciprocal() | w.logit() | w.nan_to_num() | w.flatten() | w.ravel() | w.t() | w.float() |
    w.half() | w.long() | w.bool() | w.tolist() | w.unique() | w.nonzero() | w.isinf() | w.logical_not() | w.frac() |
    w.trunc() | w.expm1() | w.contiguous() | w.clone() | w.cpu() | c.float().to(w) | b.is_set_to(b.detach()) |
    w.is_set_to(u) | w.untyped_storage().data_ptr() == u.untyped_storage().data_ptr() | w.untyped_storage().nbytes() |
    b.untyped_storage().data_ptr() == b.detach().untyped_storage().data_ptr() | w.view(torch.int32).shape | w[1][2:4] |
    c.float().type_as(w) | w.to(c.float()) | w.type() | w.T | w.mT | w.detach().numpy() |
    torch.cat([w, u]) | torch.cat([w, r], 1) | torch.cat([r, w]) | torch.stack([w, u]) | torch.stack([b, c]) |
    torch.stack([s, n]) | torch.stack([s, s]) | torch.hstack([w, r]) | torch.vstack([w, b]) | torch.where(w > 0, w, r) |
    torch.where(r > 0, w, 0.) | torch.einsum('ij,kj->ik', w, r) | torch.einsum('ij,ij->', w, u) | torch.einsum('ij,j->i',
    w, c) | torch.einsum('ij->ji', w) | torch.einsum('ij,kj,kl->il', w, u, r) | torch.outer(b, c) | torch.kron(w, b) |
    torch.cdist(w, r) | torch.dot(b, c) | torch.trace(w) | torch.addmm(r, w, w.t() @ w) | torch.tensordot(w, u, 2) |
    torch.cross(w[:, :3], r[:, :3], dim=1) | torch.equal(w, u) | torch.allclose(w, w.clone()) | torch.isclose(w, r) |
    torch.topk(w, 2, 0) | torch.quantile(w, .3) | torch.histc(w) | torch.bincount(w.long().abs().view(-1)) | torch.flip(w,
    [0]) | torch.roll(w, 1, 0) | torch.rot90(w) | torch.tril(w) | torch.diag(b) | torch.diag(w) | torch.gather(w, 0,
    torch.zeros(2, 6).long()) | torch.take(w, torch.tensor([1, 40])) | torch.index_select(w, 0, torch.tensor([7, 0])) |
    torch.masked_select(w, w > 0) | torch.searchsorted(w, r) | torch.repeat_interleave(w, 2, 0) | w.repeat(2, 1) |
    w.expand(2, 8, 6) | torch.broadcast_to(b, (8, 6)) | torch.lerp(w, r, .3) | torch.lerp(w, u, w.abs()) | torch.clamp(w,
    b, b + 1) | torch.clamp(w, max=n) | torch.maximum(w, b) | torch.minimum(w, r) | torch.nan_to_num(w) |
    torch.corrcoef(w) | torch.cov(w) | F.normalize(w) | F.normalize(w, dim=0) | F.cosine_similarity(w, r) | F.softmax(w,
    0) | F.log_softmax(w, 1) | F.mse_loss(w, r) | F.mse_loss(r, w) | F.l1_loss(w, u) | F.smooth_l1_loss(w, u) |
    F.cross_entropy(w, torch.zeros(8).long()) | F.kl_div(w, u) | F.layer_norm(w, (6,), b) | F.layer_norm(r, (6,), b, c) |
    F.gelu(w) | F.relu(w) | F.dropout(w, .5) | F.embedding(torch.tensor([1, 7, 1]), w) | F.embedding_bag(torch.tensor([[1,
    7]]), w) | F.pad(w, (1, 2)) | F.one_hot(w.long().abs(), 9) | F.conv1d(r[None].expand(1, 8, 6), w[None].expand(2, 8,
    6)[:, :, :3]) | F.glu(w) | F.rms_norm(w, (6,), b) | F.scaled_dot_product_attention(w[None], u[None], r[None]) |
    torch._weight_norm(w, torch.ones(8, 1), 0) | torch.norm_except_dim(w, 2, 0) | w[2] | w[:, 1] | w[2:5] | w[2, 3] |
    w[[1, 2]] | w[torch.tensor([1, 7])] | w[w > 0] | w[..., None] | w[::2] | w[-1] | w[1:3, 2:4] | w[:, [0, 5]] | r[:, b >
    0] | r[(b > 0).nonzero()[:1, 0]] | list(w)[3] | w.unbind(1)[2] | w.split(3)[1] | w.chunk(3, 1)[2] | len(w) | w.shape |
    w.view(-1) | w.view(4, 12) | w.reshape(6, 8) | w.permute(1, 0) | w.transpose(0, 1).reshape(-1) | w.unsqueeze(1) |
    w.diagonal() | w.unfold(0, 2, 2) | w.sum().item() | float(w.mean()) | int(w.sum() * 10) | bool((w > 0).any()) |
    f'{b.sum():.3f}' | w.max().item() | b[2].item() | b.tolist() | s.item() | 1. in w | max(b) | sum(b) | sum(w) |
    sorted(b.tolist()) | [float(x) for x in b] | round(float(s), 3) | min(s, n) | s + n | s * s | s + 1 | 1 + s | n * s |
    s / w | s.exp() | s ** 2 | -s | s > 0 | s == s | s.abs() | s.sqrt() | s.clamp(max=1e-3) | s.maximum(n) |
    torch.maximum(s, s) | w / (s + 1e-6) | w * (1 / s).clamp(max=1.) | s.sum() | s.mean() | s.norm() | s.view(1) |
    s.expand(3) | s.repeat(2) | s.to(torch.float32) | s.clone() | s.detach() | s.round() | s.unsqueeze(0)[0] |
    s.reciprocal() | s.double().pow(3) | torch.zeros_like(s) | torch.ones_like(s) + s | torch.zeros_like(w) |
    torch.ones_like(w) | torch.full_like(w, 3.) | torch.rand_like(w) | torch.randn_like(w) | torch.bernoulli(w.sigmoid())
    | torch.normal(w, 1.) | torch.multinomial(w.abs(), 2) | w.new_zeros(3) | w.new_ones(2, 2) | w.new_full((2,), 3.) |
    w.new_tensor([1., 2.]) | w.new_empty(3).zero_() | torch.empty_like(w).zero_() | torch.randint_like(w, 9) |
    torch.poisson(w.abs()) | nn.utils.parameters_to_vector([w, b]) | nn.utils.parameters_to_vector([w, r]) |
    nn.utils.get_total_norm([w, b, r]) | nn.utils.get_total_norm([w, b], float('inf')) | nn.utils.get_total_norm([w, u],
    1.) | torch._foreach_norm([w, b, r]) | torch._foreach_norm([w, u], float('inf')) | torch._foreach_add([w, r], [r, w])
    | torch._foreach_mul([w, b], 2.) | torch._foreach_sub([w, c], [u, b]) | torch._foreach_abs([w, s]) |
    torch._foreach_maximum([w], [r]) | torch._foreach_pow([w, b], 2.) | torch._foreach_exp([w, r, s]) |
    torch._foreach_lerp([w], [u], .3) | torch._foreach_addcmul([w], [u], [w]) | sum(p.pow(2).sum() for p in (w, b, u)) |
    sum(p.abs().sum() for p in (w, b)) | torch.stack([p.norm() for p in (w, b)]).norm() | w.pow(2).sum().sqrt() | (w -
    r).pow(2).mean() | w.var(0).sum() | torch.tensor([w.sum(), b.sum()]) | torch.as_tensor(w) | torch.atleast_2d(b) |
    torch.meshgrid(b, c, indexing='ij') | torch.block_diag(w, r) | torch.cartesian_prod(b, c) | torch.combinations(b) |
    torch.add(r, r, alpha=s) | torch.full((2,), s) | torch.linspace(0, s, 3) | F.leaky_relu(r, s) | torch.threshold(r, s, s)
    | torch.add(r, r, alpha=w.norm()) | torch._foreach_add([r], scalar=s) | torch.tensor([w.norm(), s]) |
    torch.logsumexp(w, (0, 1)) | torch.aminmax(w) | torch.std_mean(w) | torch.var_mean(w, 0) | torch.unique(w > 0) |
    torch.result_type(w, r) | torch.fft.fft(w).abs() | torch.special.expit(w) | torch.numel(w) | copy.deepcopy(w) |
    copy.copy(w) + 0 | pickle.loads(pickle.dumps(w)) | torch.func.vmap(lambda x: x.sum())(r) + w.sum() | w.is_contiguous()
    or True | w.stride() | w.dtype | w.device.type | w.is_leaf | w.ndim
""")

GRADIENTS = _lines("""
    (w * 2).add_(1) | (w * 2).mul_(u) | h = w * 2; h += 1; h | loss = w.sum(); loss += b.sum(); loss | loss = n * 1.; loss
    += w.sum(); loss | loss = w.sum(); loss *= 2; loss.add_(n); loss | loss = 0.; loss += w.pow(2).sum(); loss += (r *
    w).sum(); loss | h = w.t(); h = h * r.t(); h | F.linear(r, w, None).relu_() | torch.func.functional_call(nn.Linear(6,
    8), {'weight': w, 'bias': w.sum(1)}, r) | w.view(-1)[3] | w.flatten()[3:9] | w[0] * w[1] | w[w > 0].sum() | w.max() |
    w.max(1)[0] | w.norm(dim=1) | w.norm(float('inf')) | F.normalize(w) | (w - w.mean(0)) / w.std(0) | w.float().double()
    | w.half().double() | w.clamp(-.1, .1) | w.maximum(u) | w.pow(2) * b | w.clone().copy_(u) | torch.cat([w, u]).prod(1)
    | w.detach() * u | w.abs().pow(3).mean(1) | w.sigmoid() * w | w.expand(2, 8, 6) | w.double() | w.to(torch.float64) * 2
    | torch.where(w > 0, w, u) | w.masked_fill(w > 0, 0.) | w.index_select(0, torch.tensor([1, 1])) |
    torch.autograd.grad(w.pow(3).sum(), w, create_graph=True)[0] | w.chunk(2)[0] * w.chunk(2)[1] |
    torch.stack(list(w)).sum(0) | torch.einsum('ij,kj->ik', w, u) | w.lerp(u, .3) | torch.addcmul(w, u, u) | w.minimum(r)
    | w.mean() | w.mean(0, keepdim=True) * w | w.sum(1, keepdim=True) + w | w / w.sum() | w * w.mean(0) | (w @
    u.t()).trace() | w.neg().exp().log()
""")
